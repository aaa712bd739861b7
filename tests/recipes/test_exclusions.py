"""What recipes leave out of decay and adaptation."""

import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import drawn
from tests.recipes.networks import VISION
from tests.recipes.test_training_repositories import FIRST

PARAMS = drawn(VISION)


def explained(optimizer, params=PARAMS):
    return {one.name: one for one in lb.explain(optimizer, params).parameters}


def is_adapted(one):
    return one.length == "trust ratio"


@pytest.mark.parametrize("run", FIRST, ids=lambda run: run.name)
def test_every_recipe_lists_what_it_spares(run):
    """Of what is spared all is of a kind that is meant, and of what is not spared nothing is.

    A bias of attention is a bias in Flax too. It has two axes there, and one in PyTorch, where
    'tensors of one axis' means it.
    """
    recipe = lb.recipes.get(run.name, **run.asked)
    for name, one in explained(recipe.optimizer()).items():
        is_of = {
            "bias": name.endswith("bias"),
            "norm": name.endswith("/scale") or "Norm" in name,
            "vector": len(one.shape) == 1,
            "scalar": one.shape == (),
            "position": name == "pos_embedding",
            "token": name == "cls",
        }
        spared = {kind for kind, applies in is_of.items() if applies}
        assert one.decayed == (bool(recipe.weight_decay) and spared.isdisjoint(recipe.not_decayed))
        assert is_adapted(one) == spared.isdisjoint(recipe.not_adapted), one


def test_a_temperature_is_spared_by_moco_and_not_by_barlow_twins():
    for name, asked, adapted in (("moco-v3", {"epochs": 100}, False), ("barlow-twins", {}, True)):
        one = explained(lb.recipes.get(name, **asked).optimizer())["logit_scale"]
        assert is_adapted(one) == one.decayed == adapted


def test_the_optimizer_checks_that_its_exclusions_select_something():
    recipe = lb.recipes.get("byol", epochs=100)
    matrices = {"encoder": {"weights": jnp.ones((2, 3))}}
    for build in (recipe.optimizer, recipe.optimizer().init):
        with pytest.raises(
            ValueError, match=r"no parameter is of the kinds bias, norm.*encoder/weights"
        ):
            build(matrices)
    recipe.optimizer(matrices, mask=lb.matching("weights")).init(matrices)
    lb.recipes.get("swav", epochs=100).optimizer(matrices)
    with pytest.raises(ValueError, match="pattern 'bais' matches no parameter"):
        recipe.optimizer(PARAMS, mask=~lb.matching("bais"))


def test_a_mask_of_ones_own_takes_the_bias_rate_along():
    recipe = lb.recipes.get("barlow-twins")
    found = explained(recipe.optimizer(mask=~lb.matching("bias", "scale", "cls")))
    slower = {name for name, one in found.items() if one.rate < 1}
    for is_not in (lambda one: one.decayed, is_adapted):
        assert slower == {name for name, one in found.items() if not is_not(one)}
    assert "cls" in slower
    with pytest.raises(TypeError, match=r"mask must be a rule.*'resnet50/lars/barlow-twins'"):
        recipe.optimizer(mask=lambda params: params)


def test_a_mask_may_be_a_tree_of_the_kind_of_the_parameters():
    params = optax.EmaState(jnp.ones((2, 2)), {"kernel": jnp.ones((2, 2))})
    mask = optax.EmaState(False, {"kernel": True})
    optimizer = lb.recipes.get("byol", epochs=100).optimizer(params, mask=mask)
    assert [one.decayed for one in explained(optimizer, params).values()] == [False, True]


def test_stacked_layers_count_for_themselves():
    params = {"layers": {"kernel": jnp.ones((5, 2, 3)), "bias": jnp.ones((5, 3))}}
    recipe = lb.recipes.get("moco-v3", epochs=100)
    optimizer = recipe.optimizer(params, stacked=lb.stacked_layers({"layers/": 0}))
    assert [one.blocks for one in explained(optimizer, params).values()] == [5, 5]
