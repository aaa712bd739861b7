"""Runs that began with version 0.1.0, whose states had another layout, recorded with it."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_largebatch as lb

FILE = pathlib.Path(__file__).with_name("old_runs.npz")
BEFORE, AFTER = 4, 3
"""Updates with version 0.1.0 before the change, and updates after it."""

RATE = optax.linear_schedule(0.1, 0.02, 8)
STACKED = {"layers/": 0}
ON_SPHERES = {"radius": "start", "stacked": STACKED}
MUON = {"matrix_mask": ~lb.matching("embed"), "stacked": STACKED}
MUONH = {**MUON, "radius": "start"}

RUNS = {
    "muon": lambda: lb.muon(RATE, weight_decay=0.1, **MUON),
    "muon beside lamb": lambda: lb.muon(RATE, others=lb.lamb(RATE, stacked=STACKED), **MUON),
    "muonh": lambda: lb.muonh(RATE, **MUONH),
    "muonh with a head": lambda: lb.muonh(RATE, adamh_mask=lb.matching("head"), **MUONH),
    "muonh beside lamb": lambda: lb.muonh(RATE, others=lb.lamb(RATE, stacked=STACKED), **MUONH),
    "muonh beside optax": lambda: lb.muonh(RATE, others=optax.adam(RATE), **MUONH),
    "muonh, wrapped": lambda: lb.accumulate_gradients(
        lb.skip_bad_steps(
            optax.inject_hyperparams(lambda learning_rate: lb.muonh(learning_rate, **MUONH))(RATE)
        ),
        every=2,
    ),
    "muonh in MultiSteps": lambda: optax.MultiSteps(lb.muonh(RATE, **MUONH), 2),
    "adamh": lambda: lb.adamh(RATE, **ON_SPHERES),
    "adamh with a mask": lambda: lb.adamh(RATE, adamh_mask=~lb.matching("scale"), **ON_SPHERES),
    "cain": lambda: lb.cain(RATE, stacked=STACKED),
    "scaled_adam": lambda: lb.scaled_adam(RATE, stacked=STACKED),
    "learned_gradient": lambda: lb.learned_gradient(RATE, stacked=STACKED),
}


def go_on(optimizer, params, state, first, count):
    """The parameters and the state after some more updates."""
    update = jax.jit(optimizer.update)
    for index in range(first, first + count):
        gradients = jax.tree.map(lambda x, at=index: 0.3 * x + jnp.cos(3 * x + at), params)
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def recorded(name):
    """Parameters and state when the optimizer changes, and the parameters in the end.

    The state has dictionaries in the place of tuples, as from a checkpoint without its types.
    """
    file = np.load(FILE)
    numbers, tree, start = file[name], {}, 0
    for path, dtype, shape in json.loads(str(file["layouts"]))[name]:
        *above, last = path.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        size = int(np.prod(shape))
        node[last] = jnp.asarray(numbers[start : start + size].reshape(shape), dtype)
        start += size
    return tree["params"], tree["state"], tree["end"]
