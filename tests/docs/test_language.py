"""What a reader meets first is in common words, and fits the screen."""

import re

import pytest

from tests.size import ROOT

DOCS = ROOT / "docs"
FIRST = [
    ROOT / "README.md",
    DOCS / "index.md",
    DOCS / "guides" / "from_adamw_to_16k.md",
    DOCS / "guides" / "adopting.md",
]
HOUSE_WORDS = {
    "adapted": "adapted",
    "block": r"blocks?",
    "dialect": r"dialects?",
    "leaf": r"leaf|leaves",
    "link": r"links?",
    "macro-batch": r"macro-batch(?:es)?",
    "masters": "masters",
    "round": r"rounds?",
}
COLUMNS = 84


def prose(text):
    """A page without code, tables made by scripts, and addresses."""
    text = re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- (\w+).*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`]*`|(?<=\])\([^)]*\)", "", text)


def house_words_before_their_definition(text):
    """Those whose first use is not in emphasis, which is how a page defines a word, or a title."""
    found = []
    for name, pattern in HOUSE_WORDS.items():
        first = re.search(rf"(\*|\[)?\b(?:{pattern})\b(\*|\])?", text, re.IGNORECASE)
        if first and not (first[1] and first[2]):
            found.append(name)
    return found


@pytest.mark.parametrize("page", FIRST, ids=lambda page: page.stem)
def test_has_no_house_word_before_its_definition(page):
    assert not house_words_before_their_definition(prose(page.read_text()))


def test_the_glossary_defines_each():
    headings = re.findall(r"^## (.+)$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert set(HOUSE_WORDS) <= {heading.lower() for heading in headings}


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)],
    ids=lambda page: page.stem,
)
def test_code_is_at_most_84_columns_wide(page):
    blocks = re.findall(r"^```(?:python|py|sh)\n(.*?)^```", page.read_text(), re.DOTALL | re.M)
    assert not [line for block in blocks for line in block.splitlines() if len(line) > COLUMNS]


FRAGMENT = re.compile(r'^\s*"""(?:That of|Those|Of|Likewise|Their|Its)\b.*', re.MULTILINE)


def test_docstrings_stand_alone():
    """An editor shows one without the line before it: `Of a tile.` says nothing there."""
    files = sorted((ROOT / "optax_largebatch").rglob("*.py"))
    found = [(file.name, line) for file in files for line in FRAGMENT.findall(file.read_text())]
    assert files
    assert not found
