"""The gradient noise scale."""
