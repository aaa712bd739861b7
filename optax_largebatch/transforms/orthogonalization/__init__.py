"""Updates of matrices with all singular values near 1, as Muon takes them."""
