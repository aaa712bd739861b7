"""The pictures of the chains show the links that there are."""

from docs.draw_chains import DOCS, EQUATIONS, draw, names, read_chain
from tests.optimizers.registry import OPTIMIZERS


def test_every_optimizer_has_a_picture_on_a_page():
    assert set(EQUATIONS) == set(OPTIMIZERS)
    pages = "".join(page.read_text() for page in (DOCS / "algorithms").glob("*.md"))
    for optimizer in EQUATIONS:
        assert f"(../chains/{optimizer}.svg)" in pages


def test_has_an_equation_for_each_link_and_for_no_other():
    for optimizer, equations in EQUATIONS.items():
        assert {*names(read_chain(optimizer)), "apply_updates"} == set(equations)


def test_draws_a_picture_no_wider_than_a_telephone(tmp_path):
    draw("lamb").savefig(tmp_path / "lamb.svg")
    head = (tmp_path / "lamb.svg").read_text().split("viewBox=")[0]
    assert 'width="331.2pt"' in head
