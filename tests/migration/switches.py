"""Changes of the optimizer that keep its moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_largebatch as lb

PARAMS = {"kernel": jnp.arange(1.0, 7.0).reshape(2, 3), "bias": jnp.ones(3)}
SCHEDULE = optax.linear_schedule(0.1, 0.0, 20)
DECAY = {"weight_decay": 0.01}
BY_LAYER = lb.chain(
    lb.accumulate_momentum(0.9),
    lb.scale_by_trust_ratio(trust_coefficient=0.01),
    lb.scale_by_learning_rate(SCHEDULE),
)


def gradients(count):
    rng = np.random.default_rng(0)
    return [
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), PARAMS)
        for _ in range(count)
    ]


def state_after(optimizer, steps=2):
    """The state of an optimizer that has been given the parameters as their gradients."""
    state = optimizer.init(PARAMS)
    for _ in range(steps):
        _, state = optimizer.update(PARAMS, state, PARAMS)
    return state


def as_orbax(node):
    """A state as Orbax restores it without a target."""
    if hasattr(node, "_fields"):
        return {name: as_orbax(child) for name, child in node._asdict().items()} or None
    if isinstance(node, dict):
        return {name: as_orbax(child) for name, child in node.items()}
    return [as_orbax(child) for child in node] if isinstance(node, tuple) and node else node


def same_places(state, other):
    """Whether all arrays of two states are on the same devices in the same way."""
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True)
    return all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in pairs)


def sums_gradients(state):
    """Whether a state has a momentum buffer, which does not say of what."""
    return bool(optax.tree.get_all_with_path(state, "trace"))


def inject(factory, **known):
    return optax.inject_hyperparams(factory)(**known)


def micro(inner):
    return optax.MultiSteps(inner, 3)


def chained(inner):
    return optax.chain(optax.clip_by_global_norm(1.0), inner)


def without_bias(inner):
    """Hides the bias, and leaves it as it is."""
    labels = {"kernel": "trained", "bias": "frozen"}
    return optax.partition({"trained": inner, "frozen": optax.set_to_zero()}, labels)


def masked(inner):
    """Hides the bias in another way."""
    hidden = optax.masked(optax.set_to_zero(), {"kernel": False, "bias": True})
    return optax.chain(optax.masked(inner, {"kernel": True, "bias": False}), hidden)


def zeroed(inner):
    """Leaves the bias as it is, and hides it from nothing."""
    zeros = optax.masked(optax.set_to_zero(), {"kernel": False, "bias": True})
    return optax.chain(zeros, inner)


ADAM, ADAMW = optax.adam(SCHEDULE), optax.adamw(SCHEDULE)
LAMB, DECAYED = lb.lamb(SCHEDULE), lb.lamb(SCHEDULE, **DECAY)
CLIPPED = lb.lamb(SCHEDULE, max_grad_norm=1.0)
INJECTED = inject(optax.adamw, learning_rate=SCHEDULE)
MUON = lb.muon(SCHEDULE, beta=0.9)
MUONH = lb.muonh(SCHEDULE, beta=0.9, b2=0.999)
ADAMH = lb.adamh(SCHEDULE, b2=0.999)
CONTRIB = optax.contrib.muon(SCHEDULE, beta=0.9)
HEAD = lb.muonh(SCHEDULE, b2=0.999, adamh_mask=lb.matching("kernel"))
"""Its Muon moves nothing."""


def accumulated(inner):
    return lb.accumulate_gradients(inner, every=3)


SWITCHES = {
    "adam to lamb": (ADAM, DECAYED),
    "adamw to lamb": (optax.adamw(0.1), DECAYED),
    "adam to eve": (optax.adam(SCHEDULE, b2=0.98), lb.eve(SCHEDULE)),
    "lars to lars": (optax.lars(0.1), lb.lars(0.1)),
    "sgd to a chain": (optax.sgd(0.1, 0.9), BY_LAYER),
    "injected adamw to lamb": (INJECTED, DECAYED),
    "lamb to master weights": (optax.lamb(SCHEDULE), lb.master_weights(LAMB)),
    "MultiSteps of adamw to accumulated lamb": (micro(chained(ADAMW)), accumulated(CLIPPED)),
    "MultiSteps of injected sgd to an accumulated chain": (
        micro(inject(optax.sgd, learning_rate=SCHEDULE, momentum=0.9)),
        lb.skip_bad_steps(accumulated(BY_LAYER)),
    ),
    "accumulated to accumulated": (
        accumulated(lb.larc(SCHEDULE)),
        lb.skip_bad_steps(accumulated(lb.larc(SCHEDULE))),
    ),
    "MultiSteps to MultiSteps": (micro(ADAM), micro(LAMB)),
    "hidden to hidden": (without_bias(ADAM), without_bias(DECAYED)),
    "masked to hidden": (masked(optax.lars(SCHEDULE)), without_bias(lb.lars(SCHEDULE))),
    "accumulated behind a mask": (
        without_bias(micro(ADAM).gradient_transformation()),
        masked(accumulated(LAMB)),
    ),
    "zeros to hidden": (zeroed(ADAM), without_bias(LAMB)),
    "trained to frozen": (ADAM, without_bias(LAMB)),
    "several adams to lamb": (
        optax.partition({"a": ADAM, "b": optax.adam(0.1)}, {"kernel": "a", "bias": "b"}),
        LAMB,
    ),
    "adam to lamb on some steps": (
        ADAM,
        optax.conditionally_transform(LAMB, lambda step: step < 6),
    ),
    "contrib.muon to muon": (CONTRIB, MUON),
    "contrib.muon to muonh": (CONTRIB, MUONH),
    "muon to contrib.muon": (MUON, CONTRIB),
    "muon to muonh": (MUON, MUONH),
    "adamw to muon": (ADAMW, MUON),
    "adamw to muonh": (ADAMW, MUONH),
    "adamw to muonh with a head": (ADAMW, HEAD),
    "lamb to muonh": (LAMB, MUONH),
    "lamb to adamh": (LAMB, ADAMH),
    "adamh to lamb": (ADAMH, LAMB),
    "muon without Nesterov to muonh": (lb.muon(SCHEDULE, beta=0.9, nesterov=False), MUONH),
    "muon beside lamb to muon": (lb.muon(SCHEDULE, beta=0.9, others=LAMB), MUON),
    "MultiSteps of contrib.muon to accumulated muonh": (micro(CONTRIB), accumulated(MUONH)),
    "injected adamw to master weights of muon": (INJECTED, lb.master_weights(MUON)),
}
DOES_NOT_SAY = ("lars to lars", "sgd to a chain")
"""The old state has not counted the steps."""
