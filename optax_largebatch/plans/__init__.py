"""How the batch grows over a run, and the numbers that go with it."""
