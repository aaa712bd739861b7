"""Finished optimizers, one family in each file; each body is the chain itself."""
