"""Diagnostics that read the state of a run."""
