"""Measurements: each module or package in here is a command; they share `harness`.

    python -m benchmarks.step_cost --help

Run commands from the repository's root, so that the library and the harness are those of that tree.
`python benchmarks/step_cost.py` does the same if that tree is installed in place, as `make` does.
"""
