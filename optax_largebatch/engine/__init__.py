"""How a transformation that is told leaf by leaf runs."""
