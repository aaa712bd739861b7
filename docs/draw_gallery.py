"""Takes the pictures of `docs/gallery.md` from notebooks and examples that have been run.

make docs && make demo && python examples/pretrain.py
python -m docs.draw_gallery
"""

import base64
import io
import json
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parent
EXECUTED = DOCS / "_build" / "jupyter_execute" / "notebooks"
RUNS = DOCS.parent / "runs"
GALLERY = DOCS / "gallery"
WIDTH = 900  # in pixels: sharp at the size of a card, and no larger than that takes

# Which of the pictures that a notebook draws, from 0, and which file an example leaves. That of
# `03_many_devices` is on the front page, and made by `draw_front_page.py`.
NOTEBOOKS = {
    "01_quickstart": 0,
    "02_bert_lans": 2,
    "04_choose_your_batch_size": 1,
}
EXAMPLES = {"train_digits": "digits/curves.png", "pretrain": "pretrain/curves.png"}


def picture_of(notebook: Path, number: int) -> bytes:
    """A picture that an executed notebook holds."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    pictures = [data["image/png"] for data in outputs if "image/png" in data]
    return base64.b64decode(pictures[number])


def save(picture: bytes, name: str) -> None:
    """Writes a picture for a card, no wider than needed."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.thumbnail((WIDTH, WIDTH))
    image.save(GALLERY / f"{name}.png", optimize=True)


if __name__ == "__main__":
    for name, number in NOTEBOOKS.items():
        save(picture_of(EXECUTED / f"{name}.ipynb", number), name)
    for name, path in EXAMPLES.items():
        save((RUNS / path).read_bytes(), name)
