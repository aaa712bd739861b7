"""The pictures of the chains show the links that there are."""

from pathlib import Path
import runpy

import pytest

from tests.optimizers.registry import OPTIMIZERS

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "draw_chains.py"))
read_chain, names, equations = SCRIPT["read_chain"], SCRIPT["names"], SCRIPT["EQUATIONS"]


def test_every_optimizer_has_a_picture_on_a_page():
    assert set(equations) == set(OPTIMIZERS)
    pages = "".join(page.read_text() for page in (DOCS / "algorithms").glob("*.md"))
    for optimizer in equations:
        assert f"(../chains/{optimizer}.svg)" in pages


@pytest.mark.parametrize("optimizer", equations)
def test_has_an_equation_for_each_link_and_for_no_other(optimizer):
    assert {*names(read_chain(optimizer)), "apply_updates"} == set(equations[optimizer])


def test_draws_a_picture_no_wider_than_a_telephone(tmp_path):
    SCRIPT["draw"]("lamb").savefig(tmp_path / "lamb.svg")
    head = (tmp_path / "lamb.svg").read_text().split("viewBox=")[0]
    assert 'width="331.2pt"' in head
