"""What a change in the middle of a run costs: the table of the guide, cell by cell."""

import pytest

from tests.conftest import enable_x64
from tests.migration.changes import CHANGES, OPTIMIZERS, cell

QUICK = dict.fromkeys(CHANGES, "adamw") | {
    "QKV split, and joined": "lamb",
    "to AdamW": "muon",
}
NOT_EXACT = {
    **{("a new head, more words", name): "bump" for name in OPTIMIZERS},
    **{("to MuonH", name): "bump 1" for name in ("adamw", "lamb", "muon", "NorMuon")},
    ("to AdamW", "lamb"): "bump 1",
    **{(f"to {to}", "lans"): "refused: state has a NesterovSplit" for to in ("MuonH", "AdamW")},
    **{(f"to {to}", "lars"): "refused: state has a momentum buf" for to in ("MuonH", "AdamW")},
    **{("to AdamW", name): "refused: state has no second" for name in ("muon", "muonh", "NorMuon")},
}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param(change, name, marks=[pytest.mark.slow] * (QUICK[change] != name))
        for change in CHANGES
        for name in OPTIMIZERS
    ],
)
def test_a_cell(change, name):
    with enable_x64(True):
        assert cell(change, name).startswith(NOT_EXACT.get((change, name), "exact"))
