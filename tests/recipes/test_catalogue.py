"""The recipes as a catalogue: names by a word, a table by field, and what backs its cells."""

import json
from pathlib import Path
import re

import pytest

import optax_largebatch as lb
from optax_largebatch.recipes.catalogue import FIELDS, find, lines, published, rows
from tests.test_dialects import ROWS

LINES = {line.name: line for line in lines()}
RECIPES = [name for name in lb.recipes.names() if published()[name]["field"] != "ramps"]


def test_names_by_a_word():
    of_lars = [name for name in lb.recipes.names() if "/lars/" in name]
    assert lb.recipes.names("lars") == of_lars
    assert lb.recipes.names("byol") == ["resnet50/lars/byol"]
    assert "resnet50/lars/simclr-v2" in lb.recipes.names("simclr")
    speech = [name.split("/")[0] for name in lb.recipes.names("speech")]
    assert speech == ["fastpitch", "rnnt", "zipformer"]
    assert lb.recipes.names("albert/lamb/google") == ["albert/lamb/google"]
    assert lb.recipes.get("google").name == "albert/lamb/google"
    assert {name.split("/")[1] for name in lb.recipes.names("muon")} == {"muon", "muonh"}
    assert set(lb.recipes.names("nanochat")) == {"nanochat-d24/muon/speedrun", "nanochat-d34"}
    assert lb.recipes.names("ramps") == sorted(set(lb.recipes.names()) - set(RECIPES))
    with pytest.raises(ValueError, match=r"part must be a field \(language.*got 'adam'"):
        lb.recipes.names("adam")


def test_the_table_has_all_by_field():
    assert sorted(LINES) == lb.recipes.names()
    text = lb.recipes.table()
    assert max(map(len, text.splitlines())) <= 80
    assert re.findall(r"^[A-Z][A-Z -]+$", text, re.M) == [name.upper() for name in FIELDS]
    for field in FIELDS:
        part = re.search(rf"^{field.upper()}\n((?:.+\n?)*)", text, re.M)[1]
        assert re.findall(r"^\S+", part, re.M) == lb.recipes.names(field)
    for name, line in LINES.items():
        of_name = re.search(rf"^{name}\n((?:    .*\n?)*)", text, re.M)
        said = " ".join(of_name[1].split())
        for cell in (line.batch_sizes, line.length, line.result, line.not_said):
            assert " ".join(cell.split()) in said
    only = re.findall(r"^[a-z]\S+", lb.recipes.table("lars"), re.M)
    assert sorted(only) == lb.recipes.names("lars")


TYPED = json.loads(Path(__file__).with_name("typed.json").read_text())
"""What people type, alone or with the batch size, and the recipe that they mean.

And what several are called, or none, and what the error names in its place.
"""


@pytest.mark.parametrize(("typed", "name"), TYPED["found"])
def test_what_people_type_is_found(typed, name):
    assert find(*typed)["name"] == name


@pytest.mark.parametrize("kind", ["several", "near"])
def test_what_is_not_found_is_near(kind):
    for typed, expected in TYPED[kind].items():
        with pytest.raises(ValueError, match="name must be that of a recipe") as caught:
            find(typed)
        _, listed = re.split("It is a part of |Near it are ", str(caught.value))
        assert ("It is a part of" in str(caught.value)) == (kind == "several")
        listed = listed.split(";")[0].split(", ")
        assert {*expected} <= {*listed}
        assert len(listed) <= {"several": 99, "near": 6}[kind]


def test_units_that_one_needs_first_come_first():
    with pytest.raises(ValueError, match="batch_size and examples are seconds of audio"):
        lb.recipes.get("zipformer")
    recipe = lb.recipes.get("zipformer", 4000, examples=3_456_000)
    assert "seconds of audio" in recipe.summary().splitlines()[1]


def test_whose_decay_it_is():
    note = lb.recipes.get("simclr").note
    assert note.startswith("The weight decay of 1e-4 is that of the README's command")
    assert "the paper has 1e-6" in note


SOURCE = re.compile(r"\w+/[\w.-]+@[0-9a-f]{7,} .*\w|issue #\d+|arXiv \d{4}\.\d{5}|rcps_\w+\.json")


@pytest.mark.parametrize("name", lb.recipes.names())
def test_every_recipe_names_its_source(name):
    """A repository with its commit and file, an issue, or an article."""
    source = published()[name]["source"]
    assert SOURCE.search(source) or "github.com/" in source or "DeepLearningExamples" in source


@pytest.mark.parametrize("name", RECIPES)
def test_every_entry_is_complete_and_has_nothing_else(name):
    entry = published()[name]
    known = {
        "name", "field", "task", "also", "near", "units", "algorithm", "rule", "dialect",
        "examples", "rounding", "not_said", "source", "note", "not_decayed", "not_adapted",
        "common", "points",
    }  # fmt: skip
    assert set(entry) <= known
    assert {"task", "algorithm", "source", "note", "common", "points"} <= set(entry)
    for row in rows(entry):
        assert ("rule" in entry) == ("base_learning_rate" in row)
        for key in entry.get("not_said", ()):
            assert not {key, f"base_{key}"} & set(row)


def test_every_dialect_is_a_row_of_the_page():
    dialects = {row.dialect for row in ROWS}
    of_repositories = [entry for entry in published().values() if "dialect" in entry]
    assert len(of_repositories) >= 44
    assert {entry["dialect"] for entry in of_repositories} <= dialects
