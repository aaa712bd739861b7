"""How the sums over blocks are taken, for each kind of place where a step runs."""
