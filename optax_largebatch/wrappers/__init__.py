"""Wrappers around a whole optimizer: gradient accumulation, precision, loss scale, skipping."""
