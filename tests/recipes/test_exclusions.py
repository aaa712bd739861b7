"""What recipes leave out of decay and adaptation, on the parameters of whole networks."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from tests.recipes import networks
from tests.recipes.test_training_repositories import FIRST


@functools.cache
def shapes():
    """The shapes of each network; tracing them takes seconds."""
    return {
        "resnet50": networks.shapes(networks.ResNet(), 224, 224, 3),
        "vit": networks.shapes(networks.ViT(), 224, 224, 3),
        "clip": networks.shapes(networks.TwoTowers(), 8, 8, 3),
    }


def explained(name, network, **given):
    asked = next((run.asked for run in FIRST if run.name == name), {}) | given
    return lb.explain(lb.recipes.get(name, **asked).optimizer(), shapes()[network]).parameters


def is_adapted(one):
    return one.length == "trust ratio"


def is_decayed(one):
    return one.decayed


def spared(parameters, is_not):
    return {one.name for one in parameters if not is_not(one)}


def test_the_networks_are_what_they_are_called():
    sizes = {
        name: sum(leaf.size for leaf in jax.tree.leaves(params))
        for name, params in shapes().items()
    }
    assert sizes["resnet50"] == 25_557_032
    assert sizes["vit"] == 22_050_664


@pytest.mark.parametrize("run", FIRST, ids=lambda run: run.name)
def test_every_recipe_lists_what_it_spares(run):
    """Of what is spared all is of a kind that is meant, and of what is not spared nothing is."""
    recipe = lb.recipes.get(run.name, **run.asked)
    for network in shapes() if "clip" in run.name else ("resnet50", "vit"):
        params = shapes()[network]
        for one in lb.explain(recipe.optimizer(), params).parameters:
            last, where = one.name.split("/")[-1], one.name.lower()
            is_of = {
                "bias": last == "bias",
                "norm": last == "scale" or "norm" in where or "bn_" in where,
                "vector": len(one.shape) == 1,
                "scalar": one.shape == (),
                "position": last == "pos_embedding",
                "token": last == "cls",
            }
            decayed = bool(recipe.weight_decay) and not any(map(is_of.get, recipe.not_decayed))
            assert one.decayed == decayed, (network, one)
            adapted = not any(map(is_of.get, recipe.not_adapted))
            assert is_adapted(one) == adapted, (network, one)


def test_a_bias_of_attention_is_a_bias_in_flax_too():
    """It has two axes there, and one in PyTorch, where 'tensors of one axis' means it."""
    biases = {
        one.name: one for one in explained("barlow-twins", "vit") if one.name.endswith("bias")
    }
    (query,) = {one.shape for name, one in biases.items() if "query" in name}
    assert query == (6, 64)
    assert not any(one.decayed or is_adapted(one) for one in biases.values())


def test_a_temperature_is_spared_by_moco_and_not_by_barlow_twins():
    for name, adapted in (("moco-v3", False), ("barlow-twins", True)):
        given = {"epochs": 100} if name == "moco-v3" else {}
        found = {one.name: one for one in explained(name, "clip", **given)}
        one = found["logit_scale"]
        assert is_adapted(one) == one.decayed == adapted


def test_the_optimizer_checks_that_its_exclusions_select_something():
    recipe = lb.recipes.get("byol", epochs=100)
    matrices = {"encoder": {"weights": jnp.ones((2, 3))}}
    with pytest.raises(
        ValueError, match=r"no parameter is of the kinds bias, norm.*encoder/weights"
    ):
        recipe.optimizer(matrices)
    with pytest.raises(ValueError, match="no parameter is of the kinds bias, norm"):
        recipe.optimizer().init(matrices)
    own = recipe.optimizer(matrices, mask=lb.matching("weights"))
    own.init(matrices)
    lb.recipes.get("swav", epochs=100).optimizer(matrices)
    with pytest.raises(ValueError, match="pattern 'bais' matches no parameter"):
        recipe.optimizer(shapes()["resnet50"], mask=~lb.matching("bais"))


def test_a_mask_of_ones_own_takes_the_bias_rate_along():
    recipe = lb.recipes.get("barlow-twins")
    mask = ~lb.matching("bias", "scale", "cls")
    found = lb.explain(recipe.optimizer(mask=mask), shapes()["vit"]).parameters
    slower = {one.name for one in found if one.rate < 1}
    assert slower == spared(found, is_decayed) == spared(found, is_adapted)
    assert "cls" in slower
    with pytest.raises(TypeError, match=r"mask must be a rule.*'resnet50/lars/barlow-twins'"):
        recipe.optimizer(mask=lambda params: params)


def test_a_mask_may_be_a_tree_of_the_kind_of_the_parameters():
    params = optax.EmaState(jnp.ones((2, 2)), {"kernel": jnp.ones((2, 2))})
    mask = optax.EmaState(False, {"kernel": True})
    optimizer = lb.recipes.get("byol", epochs=100).optimizer(params, mask=mask)
    assert [one.decayed for one in lb.explain(optimizer, params).parameters] == [False, True]


def test_stacked_layers_count_for_themselves():
    params = {"layers": {"kernel": jnp.ones((5, 2, 3)), "bias": jnp.ones((5, 3))}}
    stacked = lb.stacked_layers({"layers/": 0})
    recipe = lb.recipes.get("moco-v3", epochs=100)
    optimizer = recipe.optimizer(params, stacked=stacked)
    assert [one.blocks for one in lb.explain(optimizer, params).parameters] == [5, 5]
    state = optimizer.init(params)
    (ratios,) = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (10,)]
    assert ratios.shape == (10,)
