"""Every name and argument on the page about moving from 0.1.0 gives a hint when it is used."""

from pathlib import Path
import re

import pytest

import optax_largebatch as lb

PAGE = (Path(__file__).parents[2] / "docs" / "from_0_1_0.md").read_text()
ROWS = re.findall(r"^\| (.*) \| (.*) \|$", PAGE, re.MULTILINE)[1:]
OLD = [(old, new) for row, new in ROWS for old in re.findall(r"`([^`]+)`", row)]
NAMES = [(old, new) for old, new in OLD if re.fullmatch(r"\w+", old)]
ARGUMENTS = re.findall(r"`([\w.]+)\((\w+)=\)`", PAGE)


def test_finds_the_rows():
    assert len(NAMES) >= 14
    assert len(ARGUMENTS) >= 14
    assert len(PAGE.split()) <= 300


@pytest.mark.parametrize(("old", "new"), NAMES)
def test_an_old_name_says_the_new_one(old, new):
    with pytest.raises(AttributeError, match=r"; here it is called '(.*)'") as caught:
        getattr(lb, old)
    (said,) = re.findall(r"here it is called '(.*)'", str(caught.value))
    assert said in new or said == "BatchPlan"  # what batch_plan returns


@pytest.mark.parametrize(("function", "argument"), ARGUMENTS)
def test_an_old_argument_says_what_to_do(function, argument):
    called = lb
    for part in function.split("."):
        called = getattr(called, part)
    with pytest.raises(TypeError, match=rf"has no argument '{argument}', got 1\. .{{30}}"):
        called(**{argument: 1})
