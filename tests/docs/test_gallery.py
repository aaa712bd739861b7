"""The gallery has a picture of each notebook and example, and each picture of the benchmarks."""

from pathlib import Path
import re

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gallery.md").read_text()
CARD = re.compile(r"^\[!\[(.+)\]\((\S+)\) (.+)\]\((\S+)\)$", re.MULTILINE)
CARDS = CARD.findall(PAGE)
DRAWN = sorted((ROOT / "benchmarks" / "results").rglob("*.png"))


def test_every_line_with_a_picture_is_a_card():
    assert len(CARDS) == PAGE.count("![") > 10


@pytest.mark.parametrize(
    ("alt", "picture", "text", "target"), CARDS, ids=[Path(card[1]).stem for card in CARDS]
)
def test_a_card_shows_and_leads_to_what_there_is(alt, picture, text, target):
    assert (ROOT / "docs" / picture).is_file()
    assert (ROOT / "docs" / target.partition("#")[0]).is_file() or target.startswith("notebooks/")
    assert alt != text


def test_has_every_notebook():
    targets = {Path(target).name for *_, target in CARDS}
    assert targets >= {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_has_every_example_that_draws():
    draws = [
        path for path in (ROOT / "examples").glob("*.py") if '/ "curves.png"' in path.read_text()
    ]
    assert draws
    for path in draws:
        assert f"(gallery/{path.stem}.png) `examples/{path.name}`" in PAGE


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_has_every_picture_of_the_benchmarks(path):
    assert f"(../{path.relative_to(ROOT).as_posix()})" in PAGE


def test_shows_every_picture_of_its_folder():
    folder = ROOT / "docs" / "gallery"
    shown = {Path(picture).name for _, picture, *_ in CARDS if picture.startswith("gallery/")}
    assert {path.name for path in folder.iterdir()} == shown
