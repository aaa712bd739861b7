"""A change of the optimizer in the middle of a run that keeps its moments."""
