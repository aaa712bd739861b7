"""The table of parity has the recorded runs that there are, and their differences."""

import re

import pytest

from docs.write_parity import Row, measured, recorded, written
from tests.size import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "parity.md").read_text()
LINE = re.compile(r"^\| (.+?) \| (float\d\d) \| (.+?) \| (\d.+?) \|$", re.M)


def counts(runs):
    """How many there are of each optimizer."""
    return {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", runs)}


ROWS = {
    (system, dtype): Row(system, dtype, counts(runs), float(difference))
    for system, dtype, runs, difference in LINE.findall(PAGE)
}


def test_has_all_systems_optimizers_and_runs():
    assert {key: row.runs for key, row in ROWS.items()} == {
        key: {name: len(cases) for name, cases in optimizers.items()}
        for key, optimizers in recorded().items()
    }


def test_the_page_is_what_the_script_writes():
    rows = [*ROWS.values()]
    assert written(PAGE, rows) == PAGE
    assert written(PAGE, rows[1:]) != PAGE


def test_the_readme_counts_the_recorded_runs():
    runs = sum(sum(row.runs.values()) for row in ROWS.values())
    assert f"{runs} recorded runs" in (DOCS.parent / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.nightly
def test_has_the_differences_of_the_smaller_recordings():
    """The others are minutes of compilation; `tests/test_golden.py` has bounds for them all."""
    for row in measured({key: own for key, own in recorded().items() if "icefall" not in key[0]}):
        then = ROWS[row.system, row.dtype].difference
        if then > 1e-14:  # below that it is chance
            assert then / 3 < row.difference < then * 3, row
