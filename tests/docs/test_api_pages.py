"""Every public name has an entry in the reference, and one only."""

from collections import Counter
import inspect
import re

import optax_largebatch as lb
from optax_largebatch import engine, testing
from tests.size import ROOT

PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
ENTRY = re.compile(r"^\.\. (currentmodule|auto\w+):: ([\w.]+)$", re.MULTILINE)


def entries():
    """The full names of what the pages document."""
    for page in PAGES:
        module = ""
        for directive, name in ENTRY.findall(page.read_text()):
            if directive == "currentmodule":
                module = name
            else:
                yield name if directive == "automodule" else f"{module}.{name}"


def names_of(module):
    """What a module offers: what it says, or its functions."""
    functions = (
        name
        for name, thing in vars(module).items()
        if inspect.isfunction(thing) and thing.__module__ == module.__name__
    )
    return getattr(module, "__all__", [name for name in functions if not name.startswith("_")])


def public():
    """The full names of all that is public."""
    for own in (engine, testing):
        yield own.__name__
        yield from (f"{own.__name__}.{name}" for name in own.__all__)
    for name in lb.__all__:
        thing = getattr(lb, name)
        if inspect.ismodule(thing):
            yield thing.__name__
            yield from (f"{thing.__name__}.{own}" for own in names_of(thing))
        else:
            yield f"optax_largebatch.{name}"


def test_every_public_name_has_one_entry():
    assert Counter(entries()) == Counter(public())
