"""Work on whole matrices, wherever their parts are."""
