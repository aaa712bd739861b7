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


SWITCHES = {
    "adam to lamb": (optax.adam(SCHEDULE), lb.lamb(SCHEDULE, **DECAY)),
    "adamw to lamb": (optax.adamw(0.1), lb.lamb(SCHEDULE, **DECAY)),
    "lamb to lamb": (optax.lamb(SCHEDULE), lb.lamb(SCHEDULE, **DECAY)),
    "adam to eve": (optax.adam(SCHEDULE, b2=0.98), lb.eve(SCHEDULE)),
    "lars to lars": (optax.lars(0.1), lb.lars(0.1)),
    "lars to lars, with schedules": (optax.lars(SCHEDULE), lb.lars(SCHEDULE)),
    "sgd to a chain": (optax.sgd(0.1, 0.9), BY_LAYER),
    "sgd with a schedule to a chain": (optax.sgd(SCHEDULE, 0.9), BY_LAYER),
    "clipped adamw to lamb": (
        chained(optax.adamw(SCHEDULE)),
        lb.lamb(SCHEDULE, max_grad_norm=1.0),
    ),
    "injected adamw to lamb": (
        inject(optax.adamw, learning_rate=SCHEDULE),
        lb.lamb(SCHEDULE, **DECAY),
    ),
    "adamw to injected lamb": (
        optax.adamw(SCHEDULE),
        inject(lb.lamb, learning_rate=SCHEDULE, **DECAY),
    ),
    "lamb to master weights": (optax.lamb(SCHEDULE), lb.master_weights(lb.lamb(SCHEDULE))),
    "MultiSteps of adamw to accumulated lamb": (
        micro(chained(optax.adamw(SCHEDULE))),
        lb.accumulate_gradients(lb.lamb(SCHEDULE, max_grad_norm=1.0), every=3),
    ),
    "MultiSteps of injected sgd to an accumulated chain": (
        micro(inject(optax.sgd, learning_rate=SCHEDULE, momentum=0.9)),
        lb.skip_bad_steps(lb.accumulate_gradients(BY_LAYER, every=3)),
    ),
    "accumulated to accumulated": (
        lb.accumulate_gradients(lb.larc(SCHEDULE), every=3),
        lb.skip_bad_steps(lb.accumulate_gradients(lb.larc(SCHEDULE), every=3)),
    ),
    "MultiSteps to MultiSteps": (micro(optax.adam(SCHEDULE)), micro(lb.lamb(SCHEDULE))),
    "hidden to hidden": (
        without_bias(optax.adam(SCHEDULE)),
        without_bias(lb.lamb(SCHEDULE, **DECAY)),
    ),
    "masked to hidden": (masked(optax.lars(SCHEDULE)), without_bias(lb.lars(SCHEDULE))),
    "hidden to masked, accumulated": (
        micro(without_bias(optax.adam(SCHEDULE))),
        lb.accumulate_gradients(masked(lb.lamb(SCHEDULE)), every=3),
    ),
    "accumulated behind a mask": (
        without_bias(micro(optax.adam(SCHEDULE)).gradient_transformation()),
        masked(lb.accumulate_gradients(lb.lamb(SCHEDULE), every=3)),
    ),
    "zeros to hidden": (zeroed(optax.adam(SCHEDULE)), without_bias(lb.lamb(SCHEDULE))),
    "trained to frozen": (optax.adam(SCHEDULE), without_bias(lb.lamb(SCHEDULE))),
    "several adams to lamb": (
        optax.partition(
            {"matrices": optax.adam(SCHEDULE), "vectors": optax.adam(0.1)},
            {"kernel": "matrices", "bias": "vectors"},
        ),
        lb.lamb(SCHEDULE),
    ),
    "adam to lamb on some steps": (
        optax.adam(SCHEDULE),
        optax.conditionally_transform(lb.lamb(SCHEDULE), lambda step: step < 6),
    ),
}
MUON = lb.muon(SCHEDULE, beta=0.9)
MUONH = lb.muonh(SCHEDULE, beta=0.9, b2=0.999)
ADAMH = lb.adamh(SCHEDULE, b2=0.999)
CONTRIB = optax.contrib.muon(SCHEDULE, beta=0.9)
HEAD = lb.muonh(SCHEDULE, b2=0.999, adamh_mask=lb.matching("kernel"))
"""Its Muon moves nothing."""
SWITCHES |= {
    "contrib.muon to muon": (CONTRIB, MUON),
    "contrib.muon to muonh": (CONTRIB, MUONH),
    "muon to contrib.muon": (MUON, CONTRIB),
    "muonh to contrib.muon": (MUONH, CONTRIB),
    "muon to muonh": (MUON, MUONH),
    "muonh to muon": (MUONH, MUON),
    "adamw to muon": (optax.adamw(SCHEDULE), MUON),
    "adamw to muonh": (optax.adamw(SCHEDULE), MUONH),
    "adamw to muonh with a head": (optax.adamw(SCHEDULE), HEAD),
    "adamw to adamh": (optax.adamw(SCHEDULE), ADAMH),
    "optax.lamb to muon": (optax.lamb(SCHEDULE), MUON),
    "optax.lamb to adamh": (optax.lamb(SCHEDULE), ADAMH),
    "lamb to muon": (lb.lamb(SCHEDULE), MUON),
    "lamb to muonh": (lb.lamb(SCHEDULE), MUONH),
    "lamb to adamh": (lb.lamb(SCHEDULE), ADAMH),
    "lamb to contrib.muon": (lb.lamb(SCHEDULE), CONTRIB),
    "adamh to muonh": (ADAMH, MUONH),
    "adamh to adamw": (ADAMH, optax.adamw(SCHEDULE)),
    "adamh to lamb": (ADAMH, lb.lamb(SCHEDULE)),
    "muonh with a head to lamb": (HEAD, lb.lamb(SCHEDULE)),
    "muon without Nesterov to muonh": (lb.muon(SCHEDULE, beta=0.9, nesterov=False), MUONH),
    "muon beside lamb to muon": (lb.muon(SCHEDULE, beta=0.9, others=lb.lamb(SCHEDULE)), MUON),
    "MultiSteps of contrib.muon to accumulated muonh": (
        micro(CONTRIB),
        lb.accumulate_gradients(MUONH, every=3),
    ),
    "injected adamw to master weights of muon": (
        inject(optax.adamw, learning_rate=SCHEDULE),
        lb.master_weights(MUON),
    ),
}
DOES_NOT_SAY = ("lars to lars", "sgd to a chain")
"""The old state has not counted the steps."""
