"""Code that the benchmarks share: networks, optimizers, compiled steps, turns, and results."""
