"""The table of parity has the recorded runs that there are, and their differences."""

from pathlib import Path
import re
import runpy

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "parity.md").read_text()
LINE = re.compile(r"^\| (.+?) \| (float\d\d) \| (.+?) \| (\d.+?) \|$", re.M)


def counts(runs):
    """How many there are of each optimizer."""
    return {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", runs)}


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(DOCS / "write_parity.py"))


def test_has_all_systems_optimizers_and_runs(script):
    said = {(system, dtype): counts(runs) for system, dtype, runs, _ in LINE.findall(PAGE)}
    recorded = script["recorded"]()
    assert said == {
        key: {name: len(cases) for name, cases in optimizers.items()}
        for key, optimizers in recorded.items()
    }


def test_the_page_is_what_the_script_writes(script):
    rows = [
        script["Row"](system, dtype, counts(runs), float(difference))
        for system, dtype, runs, difference in LINE.findall(PAGE)
    ]
    assert script["written"](PAGE, rows) == PAGE
    assert script["written"](PAGE, rows[1:]) != PAGE


def test_the_readme_counts_the_recorded_runs():
    runs = sum(sum(counts(runs).values()) for _, _, runs, _ in LINE.findall(PAGE))
    assert f"{runs} recorded runs" in (DOCS.parent / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.nightly
def test_has_the_differences_of_the_smaller_recordings(script):
    """The others are minutes of compilation; `tests/test_golden.py` has bounds for them all."""
    runs = {key: own for key, own in script["recorded"]().items() if "icefall" not in key[0]}
    said = {key[:2]: float(key[3]) for key in LINE.findall(PAGE)}
    for row in script["measured"](runs):
        then = said[row.system, row.dtype]
        if then > 1e-14:  # below that it is chance
            assert then / 3 < row.difference < then * 3, row
