"""Runs the first two cells of a notebook, which install the package and import what is used.

    python first_cells.py NOTEBOOK              # where the package is installed: both run
    python first_cells.py --missing NOTEBOOK    # where it is not, nor a network: says what to do

`make wheel` starts it outside of the repository, so that only an installed package is found.
"""

import argparse
import json
from pathlib import Path
import sys

ADVICE = "from a wheel: pip install 'PATH[examples]'. Then restart the kernel."


def main() -> None:
    """Runs the cells as a kernel does, with `%pip`, and compares."""
    from IPython.core.interactiveshell import InteractiveShell  # not among what the tests need

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--missing", action="store_true", help="the package is not installed")
    args = parser.parse_args()
    cells = json.loads(args.notebook.read_text())["cells"]
    install, imports = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"][:2]
    shell = InteractiveShell()
    if args.missing:
        error = shell.run_cell(install).error_in_exec
        assert isinstance(error, ImportError), error
        assert str(error).endswith(ADVICE), error
    else:
        shell.run_cell(install).raise_error()
        shell.run_cell(imports).raise_error()
        package = Path(shell.user_ns["lb"].__file__)
        assert package.is_relative_to(sys.prefix), package
    print(f"{args.notebook.name}: {'says what to do' if args.missing else 'runs'}")


if __name__ == "__main__":
    main()
