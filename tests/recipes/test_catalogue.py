"""The recipes as a catalogue: names by a word, a table by field, and what backs its cells."""

import re

import pytest

import optax_largebatch as lb
from optax_largebatch.recipes.published import published, rows
from tests.test_dialects import ROWS

LINES = {line.name: line for lines in lb.recipes.table().fields.values() for line in lines}


def test_names_by_a_word():
    lars = lb.recipes.names("lars")
    assert "resnet50/lars/byol" in lars
    assert all("/lars/" in name for name in lars)
    assert len(lars) == sum("/lars/" in name for name in lb.recipes.names())
    assert lb.recipes.names("byol") == ["resnet50/lars/byol"]
    assert "resnet50/lars/simclr-v2" in lb.recipes.names("simclr")
    assert set(lb.recipes.names("speech")) == {"fastpitch/lamb/nvidia", "rnnt/lamb/mlperf"}
    assert lb.recipes.names("albert/lamb/google") == ["albert/lamb/google"]
    assert {name.split("/")[1] for name in lb.recipes.names("muon")} == {"muon", "muonh"}
    with pytest.raises(ValueError, match=r"part must be a field \(language.*got 'adam'"):
        lb.recipes.names("adam")


def test_the_table_has_all_by_field():
    fields = lb.recipes.table().fields
    assert list(fields) == ["language", "supervised vision", "self-supervised vision", "speech"]
    assert sorted(LINES) == lb.recipes.names()
    text = str(lb.recipes.table())
    assert max(map(len, text.splitlines())) <= 80
    for name, line in LINES.items():
        own = re.search(rf"^{name}\n((?:    .*\n)*)", text, re.M)
        said = " ".join(own[1].split())
        for cell in (line.batch_sizes, line.epochs, line.result, line.not_said):
            assert " ".join(cell.split()) in said
    only = lb.recipes.table("lars")
    assert sorted(
        line.name for lines in only.fields.values() for line in lines
    ) == lb.recipes.names("lars")


def test_cells_are_those_of_the_data():
    assert LINES["resnet50/lars/byol"].epochs == "40, 100, 300, 1000"
    assert LINES["resnet50/lars/byol"].result == "1000: 74.3% top-1"
    assert LINES["resnet50/lars/moco-v3"].result.startswith("100: 68.9% top-1; 300: 72.8%")
    assert LINES["bert-large/lamb/mlperf"].batch_sizes == "13 from 256 to 16384"
    assert LINES["perceiver-io/lamb/deepmind"].batch_sizes == ""
    assert LINES["perceiver-io/lamb/deepmind"].not_said == "batch_size"
    assert LINES["resnet50/lars/detcon-b"].result == ""


SOURCE = re.compile(r"\w+/[\w.-]+@[0-9a-f]{7,} .*\w|issue #\d+|arXiv \d{4}\.\d{5}|rcps_\w+\.json")


@pytest.mark.parametrize("name", lb.recipes.names())
def test_every_recipe_names_its_source(name):
    """A repository with its commit and file, an issue, or an article."""
    source = published()[name]["source"]
    assert SOURCE.search(source) or "github.com/" in source or "DeepLearningExamples" in source


@pytest.mark.parametrize("name", lb.recipes.names())
def test_every_entry_is_complete_and_has_nothing_else(name):
    entry = published()[name]
    known = {
        "field", "task", "algorithm", "rule", "dialect", "examples", "steps", "not_said", "result",
        "source", "note", "not_decayed", "not_adapted", "common", "points",
    }  # fmt: skip
    assert set(entry) <= known
    assert {"task", "algorithm", "rule", "source", "note", "common", "points"} <= set(entry)
    for row in rows(entry):
        for key in entry.get("not_said", ()):
            assert not {key, f"base_{key}"} & set(row)


def test_every_dialect_is_a_row_of_the_page():
    dialects = {row.dialect for row in ROWS}
    of_repositories = [entry for entry in published().values() if "dialect" in entry]
    assert len(of_repositories) >= 44
    assert {entry["dialect"] for entry in of_repositories} <= dialects


@pytest.mark.parametrize(
    ("name", "both"),
    [
        ("simclr", ("1e-4", "1e-6")), ("simclr", ("0.075 sqrt(B)", "0.3 B / 256")),
        ("vicreg", ("0.3", "0.4")), ("swav", ("0.3 B / 256", "0.6 B / 256")),
        ("simsiam", ("66.0", "67.8")), ("detcon-b", ("warmup_epochs=10", "num_epochs // 100")),
        ("nvidia-large-multi-node", ("0.0002", "0.0001")),
        ("eva02-b16", ("DeepSpeed", "a LAMB of")),
        ("vit-s16/lamb/deit-iii", ("1e-8", "1e-6")),
        ("caformer/lamb/metaformer", ("caformer_s36",)),
        ("electra-base/lamb/nvidia-phase1", ("--skip_adaptive",)),
        ("vissl-simclr", ("original",)),
        ("marin-phase1", ("8.01e-19", "5.3e-15")), ("marin-phase2", ("3.75e-15",)),
        ("nvidia-defaults", ("0.95", "0.9 of the command line")),
        ("barlow-twins", ("1e-6", "1.5e-6")), ("bart/lamb/nvidia-phase1", ("NVLAMB",)),
    ],
)  # fmt: skip
def test_contradictions_are_told_with_both_values(name, both):
    (entry,) = [own for key, own in published().items() if name in (key, *key.split("/"))]
    for value in both:
        assert value in entry["note"]
