"""The tables of each page are what the scripts write."""

import re

import pytest

from docs import write_evidence, write_measured, write_networks, write_recipes
from tests.size import ROOT

DOCS = ROOT / "docs"
PAGES = [
    # Every network with every optimizer is slow.
    pytest.param(script, page, marks=[pytest.mark.slow] * (script is write_networks))
    for script in (write_evidence, write_measured, write_networks, write_recipes)
    for page in script.PAGES
]


@pytest.mark.parametrize(("script", "page"), PAGES)
def test_each_script_writes_its_tables(script, page):
    text = (DOCS / page).read_text()
    name = script.__name__.replace(".", "/")
    emptied = re.sub(rf"(?<=made by {name}.py -->\n).*?(?=<!-- end of)", "", text, flags=re.DOTALL)
    assert emptied != text
    assert script.written(emptied, script.PAGES[page]) == text
