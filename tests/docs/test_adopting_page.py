"""The recipes for trainers call what there is, with arguments that it takes."""

import ast
import inspect
import re

import pytest

import optax_largebatch as lb
from tests.size import ROOT

PAGE = (ROOT / "docs" / "guides" / "adopting.md").read_text()
RECIPES = re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def calls(recipe):
    """The calls of this library; a branch of a trainer may begin with `elif`."""
    for node in ast.walk(ast.parse(re.sub(r"\Aelif", "if", recipe))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("lb."):
            yield node


@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_what_there_is(recipe):
    found = list(calls(recipe))
    assert found
    for call in found:
        function = getattr(lb, call.func.attr)
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        inspect.signature(function).bind(*call.args, **named)
