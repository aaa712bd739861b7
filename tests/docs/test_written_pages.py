"""The tables of each page are what the scripts write."""

from pathlib import Path
import re
import runpy

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SCRIPTS = {
    name: runpy.run_path(str(DOCS / f"{name}.py"))
    for name in ("write_evidence", "write_measured", "write_networks", "write_recipes")
}
SLOW = {"write_networks"}  # every network with every optimizer
PAGES = [
    pytest.param(script, page, marks=[pytest.mark.slow] * (script in SLOW))
    for script, names in SCRIPTS.items()
    for page in names["PAGES"]
]


@pytest.mark.parametrize(("script", "page"), PAGES)
def test_each_script_writes_its_tables(script, page):
    text = (DOCS / page).read_text()
    tables = SCRIPTS[script]["PAGES"][page]
    emptied = re.sub(
        rf"(?<=made by docs/{script}.py -->\n).*?(?=<!-- end of)", "", text, flags=re.DOTALL
    )
    assert emptied != text
    assert SCRIPTS[script]["written"](emptied, tables) == text
