"""Each cell of the table of changes is what the page says."""

import re

import pytest

from tests.conftest import enable_x64
from tests.migration.changes import CHANGES, OPTIMIZERS, cost
from tests.size import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "guides/changing_a_run.md").read_text()
ROWS = re.findall(r"^\| .* \| .* \| (.*) \|$", PAGE.partition("<!-- end of changes")[0], re.M)
QUICK = dict.fromkeys(CHANGES, "adamw") | {
    "devices": None,
    "micro-batches": None,
    "split, and joined": "lamb",
    "to AdamW": None,
}
NIGHTLY = ("lans", "lars", "muon")
"""Their columns are much like those of others."""


def said():
    """What the page says of each change with each optimizer."""
    for change, costs in zip(CHANGES, ROWS[2:], strict=True):
        groups = [x.split(": ") for x in costs.split("; ")] if ":" in costs else [["", costs]]
        for names, words in groups:
            for name in names.split(", ") if names else OPTIMIZERS:
                marks = [pytest.mark.slow] * (QUICK[change] != name)
                marks += [pytest.mark.nightly] * (bool(marks) and name in NIGHTLY)
                yield pytest.param(change, name, words, marks=marks, id=f"{change}-{name}")


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("ignore:what NormalizeNeuronsState")
@pytest.mark.parametrize(("change", "name", "words"), [*said()])
def test_a_cell(change, name, words):
    with enable_x64(True):
        assert cost(change, name).split()[0].strip(":") == words.split()[0]
