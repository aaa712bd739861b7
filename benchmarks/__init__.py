"""What is measured: each module or package in here is a command, and `harness` is what they share.

    python -m benchmarks.step_cost --help

From the repository's root, so that the library and the harness are those of the tree one stands in.
`python benchmarks/step_cost.py` is the same where that tree is installed in place, as `make` does.
"""
