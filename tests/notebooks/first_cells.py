"""Runs the first two cells of a notebook, which install the package and import what is used.

    python first_cells.py NOTEBOOK

`make wheel` starts it outside of the repository, so that only an installed package is found, and
without a network, so that nothing else is installed.
"""

import argparse
import json
from pathlib import Path
import sys


def main():
    """Runs the cells as a kernel does, with `%pip`."""
    from IPython.core.interactiveshell import InteractiveShell  # not among what the tests need

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebook", type=Path)
    args = parser.parse_args()
    cells = json.loads(args.notebook.read_text())["cells"]
    install, imports = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"][:2]
    shell = InteractiveShell()
    shell.run_cell(install).raise_error()
    shell.run_cell(imports).raise_error()
    package = Path(shell.user_ns["lb"].__file__)
    assert package.is_relative_to(sys.prefix), package
    print(f"{args.notebook.name}: runs")


if __name__ == "__main__":
    main()
