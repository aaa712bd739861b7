"""The links that optimizers are chained from, one idea in each file."""
