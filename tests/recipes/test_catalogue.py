"""The recipes as a catalogue: names by a word, a table by field, and what backs its cells."""

import re

import pytest

import optax_largebatch as lb
from optax_largebatch.recipes.catalogue import FIELDS, find, lines, published, rows
from tests.test_dialects import ROWS

LINES = {line.name: line for line in lines()}
RECIPES = [name for name in lb.recipes.names() if published()[name]["field"] != "ramps"]


def test_names_by_a_word():
    lars = lb.recipes.names("lars")
    assert "resnet50/lars/byol" in lars
    assert all("/lars/" in name for name in lars)
    assert len(lars) == sum("/lars/" in name for name in lb.recipes.names())
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
    assert re.findall(r"^[A-Z][A-Z -]+$", text, re.M) == [name.upper() for name in FIELDS.values()]
    for field in FIELDS.values():
        part = re.search(rf"^{field.upper()}\n((?:.+\n?)*)", text, re.M)[1]
        assert re.findall(r"^\S+", part, re.M) == lb.recipes.names(field)
    for name, line in LINES.items():
        of_name = re.search(rf"^{name}\n((?:    .*\n?)*)", text, re.M)
        said = " ".join(of_name[1].split())
        for cell in (line.batch_sizes, line.length, line.result, line.not_said):
            assert " ".join(cell.split()) in said
    only = re.findall(r"^[a-z]\S+", lb.recipes.table("lars"), re.M)
    assert sorted(only) == lb.recipes.names("lars")


def test_cells_are_those_of_the_data():
    assert LINES["resnet50/lars/byol"].length == "40, 100, 300, 1000"
    assert LINES["resnet50/lars/byol"].result == "1000: 74.3% top-1"
    assert LINES["resnet50/lars/moco-v3"].result.startswith("100: 68.9% top-1; 300: 72.8%")
    assert LINES["bert-large/lamb/mlperf"].batch_sizes == "13 from 256 to 16384"
    assert LINES["perceiver-io/lamb/deepmind"].batch_sizes == ""
    assert LINES["perceiver-io/lamb/deepmind"].not_said == "batch_size"
    assert LINES["resnet50/lars/detcon-b"].result == ""
    assert LINES["marin-535b/muonh/marin"].batch_sizes == "11264 x 4096 tokens"
    assert LINES["megatron/muon/nvidia-defaults"].batch_sizes == ""
    assert LINES["glm-4.5"][1:5] == (
        "4096 to 16384 x 4096 tokens", "500B of 22T tokens", "", "increment"
    )  # fmt: skip
    assert LINES["nanochat-d34"].length == "10 percent"


TYPED = {
    "RSB A2": "resnet50/lamb/strikes-back-a2",
    "A2": "resnet50/lamb/strikes-back-a2",
    "resnet strikes back a3": "resnet50/lamb/strikes-back-a3",
    "resnet50.a1_in1k": "resnet50/lamb/strikes-back-a1",
    "deit3_small_patch16_224": "vit-s16/lamb/deit-iii",
    "deit3_base_patch16_224.fb_in1k": "vit-b16/lamb/deit-iii",
    "deit3_base_patch16_224.fb_in22k_ft_in1k": "vit/lamb/deit-iii-21k-fine-tune",
    "caformer_s18": "caformer/lamb/metaformer",
    "EVA02-CLIP-L/14": "eva-clip/lamb/eva02-l14",
    "EVA02-CLIP-E/14+": "eva-clip/lamb/eva02-e14-plus",
    "BYOL": "resnet50/lars/byol",
    "SimCLR": "resnet50/lars/simclr",
    "SimCLR v2": "resnet50/lars/simclr-v2",
    "MoCo v3": "resnet50/lars/moco-v3",
    "mocov3": "resnet50/lars/moco-v3",
    "Barlow Twins": "resnet50/lars/barlow-twins",
    "SwAV": "resnet50/larc/swav",
    "Goyal et al.": "resnet50/sgd/linear",
    "MLPerf ResNet": "resnet50/lars/mlperf",
    "MLPerf BERT": "bert-large/lamb/mlperf",
    "BERT in 76 minutes": "bert-large/lamb/paper",
    "modded-nanogpt muon": "gpt2-124m/muon/track-3",
    "modded-nanogpt muonh": "gpt2-124m/muonh/track-3",
    "speedrun": "nanochat-d24/muon/speedrun",
    "zipformer": "zipformer/scaled_adam/icefall",
    "ScaledAdam": "zipformer/scaled_adam/icefall",
    "RNN-T": "rnnt/lamb/mlperf",
    "DeepSeek V3": "deepseek-v3",
    "llama 3": "llama-3-405b",
    ("lans", 98304): "bert-large/lans/paper-phase1",
    ("lans", 33792): "bert-large/lans/paper-phase2",
    ("BERT", 65536): "bert-large/lamb/nvidia-phase1",
    ("moonlight", 4096): "moonlight-16b/muon/moonshot-cooldown",
}
"""What people type, alone or with the batch size, and the recipe that they mean."""

SEVERAL = {
    "rsb": ["resnet50/lamb/strikes-back-a1", "resnet50/lamb/strikes-back-a2"],
    "BERT": ["bert-large/lamb/mlperf", "bert-large/lans/paper-phase1"],
    "marin": ["marin-535b/muonh/marin", "marin-67b/muonh/marin-phase1"],
    "resnet": ["resnet50/lars/byol", "resnet50/sgd/linear"],
    "nanochat": ["nanochat-d24/muon/speedrun", "nanochat-d34"],
}
NEAR = {
    "conformer": ["rnnt/lamb/mlperf", "zipformer/scaled_adam/icefall"],
    "zipformr": ["zipformer/scaled_adam/icefall"],
    "pruned_transducer_stateless7": ["zipformer/scaled_adam/icefall"],
    "timm": ["resnet50/lamb/strikes-back-a1", "caformer/lamb/metaformer"],
    "Kimi": ["moonlight-16b/muon/moonshot-pretraining"],
    "imagenet": ["resnet50/lamb/you"],
    "dino": ["none"],
}
"""What is not here, and what the error names in its place."""


@pytest.mark.parametrize("typed", TYPED)
def test_what_people_type_is_found(typed):
    assert find(*(typed if isinstance(typed, tuple) else (typed,))) == TYPED[typed]


@pytest.mark.parametrize("typed", SEVERAL | NEAR)
def test_what_is_not_found_is_near(typed):
    with pytest.raises(ValueError, match="name must be that of a recipe") as caught:
        find(typed)
    _, listed = re.split("It is a part of |Near it are ", str(caught.value))
    assert ("It is a part of" in str(caught.value)) == (typed in SEVERAL)
    listed = listed.split(";")[0].split(", ")
    assert {*(SEVERAL | NEAR)[typed]} <= {*listed}
    assert len(listed) <= (99 if typed in SEVERAL else 6)


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
        "field", "task", "also", "near", "units", "algorithm", "rule", "dialect", "examples",
        "rounding", "not_said", "source", "note", "not_decayed", "not_adapted", "common", "points",
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
