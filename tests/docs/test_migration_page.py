"""The page about moving from 0.1.0 names what is gone, and what is here."""

import operator
import re

import pytest

import optax_largebatch as lb
from tests.size import ROOT

PAGE = (ROOT / "docs" / "from_0_1_0.md").read_text()
ROWS = re.findall(r"^\| (.*) \| (.*) \|$", PAGE, re.MULTILINE)[1:]
OLD = [(old, new) for row, new in ROWS for old in re.findall(r"`([^`]+)`", row)]
NAMES = [(old, new) for old, new in OLD if re.fullmatch(r"\w+", old)]
ARGUMENTS = re.findall(r"`([\w.]+)\((\w+)=\)`", PAGE)


def test_finds_the_rows():
    assert len(NAMES) >= 14
    assert len(ARGUMENTS) >= 14
    assert len(PAGE.split()) <= 300


@pytest.mark.parametrize(("old", "new"), NAMES)
def test_a_name_of_today_takes_the_place_of_an_old_one(old, new):
    assert old not in lb.__all__ or old == "scale_by_learned_matrices"
    for name in re.findall(r"`~?([a-zA-Z_.]+)[`(]", new):
        assert operator.attrgetter(name)(lb)


@pytest.mark.parametrize(("function", "argument"), ARGUMENTS)
def test_an_old_argument_is_an_error(function, argument):
    with pytest.raises(TypeError, match=f"'{argument}'"):
        operator.attrgetter(function)(lb)(**{argument: 1})
