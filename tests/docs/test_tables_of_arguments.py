"""Tables of arguments name what exists, and give the defaults that hold."""

import ast
import inspect
import re
from typing import NamedTuple

import pytest

import optax_largebatch as lb
from tests.optimizers.registry import OPTIMIZERS
from tests.size import ROOT

DOCS = ROOT / "docs"
ALGORITHMS = sorted((DOCS / "algorithms").glob("*.md"))
WITH_DEFAULTS = [DOCS / "coming_from.md", *ALGORITHMS]
OURS = re.compile(r"here(?:, in `(\w+)`)?|argument(?: of `(\w+)`)?")
KNOWN = {*lb.__all__, "optax", "lb", "params", *inspect.signature(lb.scale_by_lars).parameters}
KNOWN = KNOWN.union(*(entry.arguments for entry in OPTIMIZERS.values()))


def by_page(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


class Row(NamedTuple):
    """A row of a table: what this library calls something, and its defaults by optimizer."""

    ours: str
    defaults: dict[str, str]


def rows(page):
    """The rows of all tables that have a column for this library."""
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
        head, _, *body = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("| "))]
            for line in table.splitlines()
        ]
        columns = {index: OURS.fullmatch(cell) for index, cell in enumerate(head)}
        ours = next((index for index, match in columns.items() if match), None)
        if ours is None:
            continue
        optimizer = next((name for name in columns[ours].groups() if name), "")
        of = {}  # which column has the defaults of which optimizer
        for index, cell in enumerate(head):
            if optimizer and cell in ("default", "default here"):
                of[index] = optimizer
            elif named := re.fullmatch(r"(?:default )?of `(\w+)`", cell):
                of[index] = named[1]
        for cells in body:
            cells += [""] * (len(head) - len(cells))
            yield Row(cells[ours], {own: cells[i] for i, own in of.items()})


@by_page([*WITH_DEFAULTS, DOCS / "coming_from" / "optax.md"])
def test_names_exist(page):
    codes = [code for row in rows(page) for code in re.findall(r"`([^`]+)`", row.ours)]
    names = {re.match(r"\w+", code)[0] for code in codes if re.match(r"[a-z]", code)}
    assert names
    assert names <= KNOWN


def said(text):
    """The value that a cell gives, in letters, or None where it is a sentence."""
    text = text.strip("`")
    if text in ("-", "none"):
        return "-"
    if text in ("off", "the identity"):
        return "None"
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        return None


@by_page(WITH_DEFAULTS)
def test_defaults_hold(page):
    compared = 0
    for row in rows(page):
        own = re.findall(r"`(\w+)(?:=.*?)?`", row.ours)
        for optimizer, cell in row.defaults.items():
            known = inspect.signature(getattr(lb, optimizer)).parameters
            values = [said(text) for text in cell.split(";")[0].split(", ")]
            if not cell or None in values or len(values) != len(own) or not set(own) <= set(known):
                continue
            for name, value in zip(own, values, strict=True):
                default = known[name].default
                default = "-" if default is inspect.Parameter.empty else str(default)
                assert default == value or float(default) == float(value), (optimizer, name)
                compared += 1
    assert compared >= 4


@by_page(ALGORITHMS)
def test_examples_of_algorithms_build_an_optimizer(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    names = {}
    for block in blocks:
        exec(block, names)
    assert callable(names["optimizer"].update)
