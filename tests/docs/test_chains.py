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


def test_reads_what_stands_in_the_source():
    """As a reader sees it in `optimizers/lans.py`."""
    links = read_chain("lans")
    assert [link.name for link in links] == [
        "centralize_gradients",
        "normalize_by_block_norm",
        "clip_by_value",
        "nesterov_split",
        "scale_by_learning_rate",
    ]
    assert [link.optional for link in links] == [True, False, True, False, False]
    (inside,) = links[3].branches
    assert [link.name for link in inside] == ["add_decayed_weights", "scale_by_trust_ratio"]


def test_reads_branches_and_arguments_at_their_defaults():
    assert [link.name for link in read_chain("lars")][2:] == [
        "scale_by_learning_rate",
        "accumulate_momentum",
    ]
    _, sum_of, *_ = read_chain("cain")
    assert [len(branch) for branch in sum_of.branches] == [3, 1]


def test_a_link_is_off_if_its_mask_selects_nothing_by_default():
    off = {link.name: link.optional for link in read_chain("muon")}
    assert off["scale_by_trust_ratio"]
    assert not off["scale_by_matrix_shape"]
    assert not off["add_decayed_weights"]


def test_refuses_what_is_no_optimizer():
    with pytest.raises(ValueError, match="optimizer must be a function"):
        read_chain("sgd")


def test_draws_a_picture_no_wider_than_a_telephone(tmp_path):
    SCRIPT["draw"]("lamb").savefig(tmp_path / "lamb.svg")
    head = (tmp_path / "lamb.svg").read_text().split("viewBox=")[0]
    assert 'width="331.2pt"' in head
