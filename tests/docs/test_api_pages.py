"""Every public name has an entry in the reference, and one only."""

from collections import Counter
from pathlib import Path
import re

import optax_largebatch as lb

PAGES = sorted((Path(__file__).parents[2] / "docs" / "api").glob("*.md"))
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


def test_every_public_name_has_one_entry():
    public = [f"optax_largebatch.{name}" for name in lb.__all__]
    public += [f"optax_largebatch.recipes.{name}" for name in lb.recipes.__all__]
    assert Counter(entries()) == Counter(public)
