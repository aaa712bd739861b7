"""Runs the notebooks and keeps what they print and draw, as `make notebooks` does.

    python -m docs.run_notebooks [NAME ...]

A last cell that is not kept checks what their text says.
"""

import argparse
import base64
import hashlib
import io
from pathlib import Path

import nbformat
from PIL import Image

from tests.notebooks.key_numbers import KEY_NUMBERS

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def digest(notebook: nbformat.NotebookNode) -> str:
    """A number for the code of a notebook: its outputs are those of the code that has the same."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def smaller(picture: str) -> str:
    """The same PNG with a palette."""
    written = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    image.convert("RGB").quantize(256).save(written, "png", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def executed(path: Path) -> nbformat.NotebookNode:
    """A notebook with the outputs of a new run, without progress bars and warnings."""
    from nbclient import NotebookClient  # for the site alone; the tests do without

    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(KEY_NUMBERS[path.stem]))
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", record_timing=False)
    client.execute()
    notebook.cells.pop()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]
            for data in (x.data for x in cell.outputs if "image/png" in x.get("data", {})):
                data["image/png"] = smaller(data["image/png"])
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata.outputs_of = digest(notebook)
    return notebook


def main() -> None:
    """Runs those that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", default=sorted(KEY_NUMBERS), choices=sorted(KEY_NUMBERS)
    )
    for name in parser.parse_args().names:
        path = NOTEBOOKS / f"{name}.ipynb"
        nbformat.write(executed(path), path)
        print(name)


if __name__ == "__main__":
    main()
