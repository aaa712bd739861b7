"""Each cell of the table of changes is what the page says."""

from pathlib import Path
import re
import runpy

import pytest

from tests.conftest import enable_x64

DOCS = Path(__file__).parents[2] / "docs"
PROGRAM = runpy.run_path(str(DOCS / "write_changes.py"))
ROWS = re.findall(
    r"^\| .* \| .* \| (.*) \|$", (DOCS / "guides/changing_a_run.md").read_text(), re.M
)
QUICK = dict.fromkeys(PROGRAM["WORDS"], "adamw") | {
    "split, and joined": "lamb",
    "to AdamW": "muon",
}
NIGHTLY = ("lans", "lars", "muon")
"""Their columns are much like those of others."""


def said():
    """What the page says of each change with each optimizer."""
    for change, cost in zip(PROGRAM["WORDS"], ROWS[2:], strict=True):
        groups = [x.split(": ") for x in cost.split("; ")] if ":" in cost else [["", cost]]
        for names, words in groups:
            for name in names.split(", ") if names else PROGRAM["OPTIMIZERS"]:
                marks = [pytest.mark.slow] * (QUICK[change] != name)
                marks += [pytest.mark.nightly] * (bool(marks) and name in NIGHTLY)
                yield pytest.param(change, name, words, marks=marks, id=f"{change}-{name}")


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("change", "name", "words"), [*said()])
def test_a_cell(change, name, words):
    with enable_x64(True):
        assert PROGRAM["cell"](change, name).split()[0].strip(":") == words.split()[0]
