"""The transformations that optimizers are chained from, one idea in each file."""
