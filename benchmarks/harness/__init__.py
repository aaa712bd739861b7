"""What the benchmarks share: networks, optimizers, compiled steps, turns, and where results go."""
