"""The table of parity has the recorded runs that there are, and their differences."""

from pathlib import Path
import re
import runpy

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "parity.md").read_text()
LINE = re.compile(
    r"^\| (.+?) \| (\w+) \| (float\d\d) \| (\d+) \| (\d+) \| (.+?) \| (.+?) \|$", re.M
)


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(DOCS / "write_parity.py"))


def test_has_all_systems_optimizers_and_cases(script):
    said = {(system, name): (dtype, int(n)) for system, name, dtype, n, *_ in LINE.findall(PAGE)}
    recorded = script["recorded"]()
    assert said == {key: (cases[0].dtype, len(cases)) for key, cases in recorded.items()}


def test_puts_rows_where_they_belong(script):
    row = script["Row"]("MXNet 2.0.0b1", "LAMB", "float32", 10, 120, 7.2e-6, 6.7e-6)
    page = script["written"](PAGE, [row])
    assert str(row) in PAGE
    assert len(LINE.findall(page)) == 1
    assert page.split("<!--")[0] == PAGE.split("<!--")[0]
    assert page.split("-->")[-1] == PAGE.split("-->")[-1]


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_front_page_counts_the_recorded_runs(name):
    cases = sum(int(cases) for _, _, _, cases, *_ in LINE.findall(PAGE))
    assert f"{cases} recorded runs" in (DOCS.parent / name).read_text()


@pytest.mark.slow
@pytest.mark.nightly
def test_has_the_differences_of_the_smaller_recordings(script):
    """The others are minutes of compilation; `tests/test_golden.py` has bounds for them all."""
    runs = {key: cases for key, cases in script["recorded"]().items() if "icefall" not in key[0]}
    said = {key[:2]: key[5:] for key in LINE.findall(PAGE)}
    for row in script["measured"](runs):
        for now, then in zip((row.float32, row.float64), said[row[:2]], strict=True):
            assert (now is None) == (then == "-")
            if now is not None and float(then) > 1e-14:  # below that it is chance
                assert float(then) / 3 < now < float(then) * 3, row
