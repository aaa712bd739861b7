"""Matrices that are learned while training."""
