"""What a caller gives `get`: what sources leave open, what replaces them, sizes by their rules."""

import math

import pytest

import optax_largebatch as lb
from optax_largebatch.recipes.catalogue import published

IMAGES = 1281167
OPEN = {
    "resnet50/lars/simclr-linear": {"batch_size": 512, "epochs": 100},
    "resnet50/lars/simclr-v2": {"weight_decay": 1e-4, "warmup_steps": 3127},
    "resnet50/lars/simclr-v2-fine-tune": {"examples": 12811},
    "resnet50/lars/barlow-twins-batch-sizes": {"bias_learning_rate": 0.01},
    "vit/lamb/deit-iii-21k": {"examples": 10**7},
    "caformer/lamb/metaformer-fine-tune": {"weight_decay": 0.0},
    "perceiver-io/lamb/deepmind": {"batch_size": 1024},
    "fastpitch/lamb/nvidia": {"examples": 12500},
    "rnnt/lamb/mlperf": {"examples": 280_000, "epochs": 80},
    "zipformer/scaled_adam/icefall": {"batch_size": 4000, "examples": 10**7},
    "megatron/muon/nvidia-defaults": {"batch_size": 8, "learning_rate": 1e-4, "total_steps": 1000},
}
CHOICE = {
    "resnet50/lars/barlow-twins-batch-sizes": {"batch_size": 256},
    "vit/lamb/deit-iii-21k": {"epochs": 90},
    "rnnt/lamb/mlperf": {"batch_size": 512},
}


@pytest.mark.parametrize("name", OPEN)
def test_says_what_the_source_leaves_open(name):
    choice, given = CHOICE.get(name, {}), OPEN[name]
    with pytest.raises(ValueError, match="must be given") as caught:
        lb.recipes.get(name, **choice)
    for key in given:
        assert key in str(caught.value)
        if len(given) > 1:
            rest = {other: value for other, value in given.items() if other != key}
            with pytest.raises(ValueError, match=f"^{key} must be given for .*does not say it"):
                lb.recipes.get(name, **choice, **rest)
    recipe = lb.recipes.get(name, **choice, **given)
    assert "as given here" not in recipe.origin
    for key, value in given.items():
        if hasattr(recipe, key):
            assert getattr(recipe, key) == value


def test_that_list_has_all_that_the_catalogue_has():
    missing = {
        name: set(entry["not_said"])
        for name, entry in published().items()
        if entry["not_said"] and entry["field"] != "ramps"
    }
    assert missing == {name: set(given) for name, given in OPEN.items()}


def test_total_steps_stand_for_epochs_and_examples():
    recipe = lb.recipes.get("fastpitch", total_steps=10_000)
    assert recipe.total_steps == 10_000
    recipe = lb.recipes.get("simclr-linear", 512, total_steps=30_000)
    assert (recipe.total_steps, recipe.warmup_steps) == (30_000, 10 * IMAGES // 512)


def test_beyond_the_published_sizes_by_the_rule_of_the_source():
    byol = lb.recipes.get("byol", 2048, epochs=300)
    assert math.isclose(byol.learning_rate, 0.3 * 2048 / 256)
    assert (byol.warmup_steps, byol.total_steps) == (10 * IMAGES // 2048, 300 * IMAGES // 2048)
    assert byol.origin.startswith("extrapolated from the published batch size 4096")
    assert "0.3 B / 256" in byol.summary()
    assert byol.epochs == 300
    simclr = lb.recipes.get("resnet50/lars/simclr", 512)
    assert math.isclose(simclr.learning_rate, 0.075 * math.sqrt(512))
    assert "0.075 sqrt(B)" in simclr.origin
    twins = lb.recipes.get("barlow-twins", 512)
    assert math.isclose(twins.bias_learning_rate, 0.0048 * 2)
    assert math.isclose(twins.end_value, 0.001 * 0.2 * 2)


@pytest.mark.parametrize(
    ("name", "batch_size"), [("resnet50/sgd/linear", 512), ("resnet50/lars/mlperf", 1632)]
)
def test_another_rate_scales_the_whole_schedule(name, batch_size):
    """One begins its warm-up above 0, the other ends its decay above 0."""
    published = lb.recipes.get(name, batch_size)
    third = lb.recipes.get(name, batch_size, learning_rate=published.learning_rate / 3)
    for part in (0, 0.02, 0.1, 0.4, 0.9, 1):
        step = round(part * published.total_steps)
        expected = pytest.approx(float(published.schedule()(step)) / 3, rel=1e-5)
        assert float(third.schedule()(step)) == expected


def test_between_published_sizes():
    vicreg = lb.recipes.get("vicreg", 1024, epochs=100)
    assert math.isclose(vicreg.learning_rate, 0.3 * 1024 / 256)
    assert "by the rule of the source" in vicreg.origin
    assert vicreg.result is None
    twins = lb.recipes.get("barlow-twins-batch-sizes", 362, bias_learning_rate=0.01)
    assert 0.4 < twins.learning_rate < 0.6
    assert twins.bias_learning_rate == 0.01


def test_a_result_is_that_of_the_published_run_alone():
    assert lb.recipes.get("barlow-twins").result == "73.5% top-1"
    assert "Reached:  73.5% top-1." in lb.recipes.get("barlow-twins").summary()
    for given in ({"batch_size": 512}, {"weight_decay": 0.0}, {"epochs": 300}, {"examples": 99}):
        assert lb.recipes.get("barlow-twins", **given).result is None
    assert lb.recipes.get("resnet50/lars/mlperf", 1632).result == "75.9% top-1 (the target)"


def test_replaces_what_the_source_says():
    recipe = lb.recipes.get("barlow-twins", total_steps=20_000, learning_rate=0.8, weight_decay=0)
    assert (recipe.total_steps, recipe.learning_rate, recipe.weight_decay) == (20_000, 0.8, 0)
    assert recipe.warmup_steps == 6260
    assert math.isclose(recipe.end_value, 0.0008)
    assert math.isclose(recipe.bias_learning_rate, 0.8 * 0.0048 / 0.2)
    assert recipe.origin == ("as published; learning_rate, total_steps, weight_decay as given here")
    # A warm-up that is a part of the run stays one.
    recipe = lb.recipes.get("bert-large/lamb/paper", 32768, total_steps=1000)
    assert recipe.warmup_steps == 200
    recipe = lb.recipes.get("moco-v3", epochs=100, examples=50_000)
    assert (recipe.warmup_steps, recipe.total_steps) == (10 * 12, 100 * 12)
    recipe = lb.recipes.get("barlow-twins", epochs=300)
    assert (recipe.epochs, recipe.total_steps) == (300, 300 * 626)
    recipe = lb.recipes.get("resnet50/sgd/linear", 256, total_steps=900, warmup_steps=9)
    assert float(recipe.schedule()(301)) == pytest.approx(0.01)
    recipe = lb.recipes.get("resnet50/lars/mlperf", 1632, total_steps=9000)
    assert (recipe.total_steps, recipe.warmup_steps) == (9000, 1570)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("byol", {"epochs": 200}, "epochs must be one of 40, 100, 300, 1000"),
        ("vicreg", {"batch_size": 2048}, "epochs must be one of 100, 1000 for .*vicreg', got None"),
        ("vicreg", {"epochs": 100}, "batch_size must be given"),
        ("albert", {"epochs": 3}, "epochs must be None for 'albert/lamb/google'"),
        ("moco-v3", {"epochs": 100, "total_steps": 99}, "total_steps must be"),
        ("byol", {"epochs": 40, "bias_learning_rate": 1.0}, "bias_learning_rate must"),
        ("bert-large/adam", {}, "got 'bert-large/adam'. Near it are bert-large/lamb"),
    ],
)
def test_wrong_arguments(name, given, says):
    """What the ranges of single arguments, in test_public_arguments.py, do not say."""
    with pytest.raises(ValueError, match=says):
        lb.recipes.get(name, **given)
