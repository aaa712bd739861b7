"""Parameters of the kinds that recipes are for, and what every optimizer of a recipe must do."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import helpers, reference

TRANSFORMER = {
    "embedding": (7, 8),
    "attention/query/kernel": (8, 2, 4),
    "attention/query/bias": (2, 4),
    "attention/out/kernel": (2, 4, 8),
    "attention/out/bias": (8,),
    "LayerNorm_0/scale": (8,),
    "LayerNorm_0/bias": (8,),
    "Dense_0/kernel": (8, 16),
    "Dense_0/bias": (16,),
    "head/kernel": (8, 7),
}
"""Shapes by name, as Flax has them. The biases of attention have two axes."""

VISION = TRANSFORMER | {
    "conv_init/kernel": (3, 3, 3, 8),
    "bn_init/scale": (8,),
    "BatchNorm_0/scale": (8,),
    "BatchNorm_0/bias": (8,),
    "cls": (1, 1, 8),
    "pos_embedding": (1, 5, 8),
    "logit_scale": (),
}
"""With what residual networks, vision transformers and CLIP have besides."""


SMALL = {
    "conv/kernel": (3, 3, 2, 4),
    "dense/bias": (4,),
    "dense/kernel": (3, 4),
    "attention/bias": (2, 3),
    "norm/scale": (4,),
    "norm/bias": (4,),
}


def assert_moves(recipe, formula, bound, rtol, leaves=SMALL, **numbers):
    """Four steps of a recipe's optimizer are those of a formula, behind a clip of the gradient."""
    start = helpers.drawn(SMALL, "float64")
    gradients = helpers.drawn({name: (4, *shape) for name, shape in SMALL.items()}, "float64", 1)
    ours = trained(recipe.optimizer(start), start, gradients)
    start, gradients = jax.device_get((start, gradients))
    gradients = reference.clip_by_global_norm(gradients, bound or np.inf)
    theirs = reference.trajectory(formula, start, gradients, **numbers)
    for name in leaves:
        moved = theirs[name][-1] - start[name]
        assert np.abs(moved).max() > 0
        np.testing.assert_allclose(ours[name] - start[name], moved, rtol, err_msg=name)


def trained(optimizer, params, gradients):
    """The parameters after a step with each gradient of a stack."""
    return jax.jit(lambda x: helpers.trained(optimizer, x, helpers.given, gradients)[0][0])(params)


def takes_a_step(recipe, shapes, **rules):
    """Two steps: a warm-up may begin with a rate of 0."""
    params, gradients = (helpers.drawn(shapes, seed=seed) for seed in range(2))
    optimizer = recipe.optimizer(params, **rules)
    update = helpers.compiled(optimizer.update)
    _, state = update(gradients, optimizer.init(params), params)
    updates, _ = update(gradients, state, params)
    for name, moved in updates.items():
        assert np.all(np.isfinite(moved)), name
        assert np.any(moved != 0), name


def at_step(optimizer, params, step):
    """The state of an optimizer whose counters are at a step."""
    state = optimizer.init(params)
    return jax.tree.map(lambda x: jnp.full_like(x, step) if x.dtype == jnp.int32 else x, state)


def built_by_code(recipe, params):
    """The variables of the printed program, whose optimizer is checked to be that of the recipe."""
    program = {}
    exec(recipe.code(), program)
    gradients = jax.tree.map(lambda p: jnp.cos(3 * p), params)
    updates = [
        jax.jit(optimizer.update)(gradients, at_step(optimizer, params, 7), params)[0]
        for optimizer in (recipe.optimizer(params), program["optimizer"])
    ]
    jax.tree.map(np.testing.assert_array_equal, *updates)
    return program
