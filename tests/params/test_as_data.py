"""Rules, groups and stacks are data: they can be pickled, compared and hashed."""

import copy
import functools
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest

import optax_largebatch as lb
from optax_largebatch.engine import Matrices
from optax_largebatch.params.leaves import LeafSharding


def is_large(params):
    return jax.tree.map(lambda leaf: leaf.size > 5, params)


def on_the_first_axis(params):
    return {"dense": None, "layers": 0}


MAKERS = {
    "matching": lambda: lb.matching("bias", "kernel$"),
    "at_least_ndim": lambda: lb.at_least_ndim(2),
    "matching_kinds": lambda: lb.matching_kinds("bias", "norm"),
    "not": lambda: ~lb.matching("(^|/)bias$"),
    "and": lambda: ~lb.matching("bias") & lb.at_least_ndim(2),
    "or": lambda: lb.matching("bias") | ~(lb.matching("kernel") & lb.at_least_ndim(3)),
    "own": lambda: lb.Rule("short names", short_names),
    "groups": lambda: lb.param_groups(
        {"params": lb.matching("bias"), "weight_decay": 0.0, "learning_rate_scale": 0.1},
        {"params": lb.matching("(^|/)dense/kernel$"), "learning_rate": 0.5},
    ),
    "no stacks": lambda: lb.stacked_layers({}),
    "stacks by patterns": lambda: lb.stacked_layers({"layers/": 0, "layers/kernel": 1}),
    "stacks by a tree": lambda: lb.stacked_layers({"dense": None, "layers": 0}),
    "stacks by a function": lambda: lb.stacked_layers(on_the_first_axis),
    "matrices": lambda: Matrices((0,), (1,), LeafSharding((2, 3), ((), ("fsdp",)))),
}


def short_names(named):
    return [len(name) < 12 for name, _ in named]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_says_the_same_is_the_same(make):
    one, other = make(), make()
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1
    for copied in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert copied == one
        assert hash(copied) == hash(one)
        assert repr(copied) == repr(one)


def test_what_says_something_else_is_something_else():
    made = [make() for make in MAKERS.values()]
    made += [lb.matching("kernel$", "bias"), lb.matching("bias"), lb.at_least_ndim(3)]
    made += [lb.matching("bias") | lb.matching("kernel"), ~lb.matching_kinds("bias")]
    made += [lb.stacked_layers({"layers/": 0}), lb.stacked_layers({"dense": 0, "layers": 0})]
    made += [lb.param_groups({"params": lb.matching("bias"), "weight_decay": 0.1})]
    assert len(set(made)) == len(made)


def test_in_other_words():
    assert ~lb.matching("bias") == ~lb.matching("bias")
    assert ~lb.matching_kinds("bias") == ~lb.matching_kinds("bias")
    assert lb.at_least_ndim(np.int64(2)) == lb.at_least_ndim(2)
    assert lb.stacked_layers({"a": 0, "b": (1,)}) == lb.stacked_layers({"b": 1, "a": 0})
    small, large = {"params": lb.matching("(^|/)b$"), "weight_decay": 0.0}, {"learning_rate": 1.0}
    one, other = (lb.param_groups(group) for group in (small | large, large | small))
    assert one == other
    assert hash(one) == hash(other)


def test_a_function_of_the_user_compares_as_it_does_itself():
    def select(named):
        return [True for _ in named]

    rule = lb.Rule("mine", select)
    assert rule == lb.Rule("mine", select)
    assert ~rule & rule == ~rule & lb.Rule("mine", select)
    assert rule != lb.Rule("mine", lambda named: [True for _ in named])
    assert lb.stacked_layers(is_large) == lb.stacked_layers(is_large)
    assert lb.stacked_layers(is_large) != lb.stacked_layers(on_the_first_axis)


def test_another_process_has_an_equal_rule():
    """Strings have another hash there."""
    made = {name: make() for name, make in MAKERS.items() if name not in OF_THIS_FILE}
    program = """
import pickle, sys
import optax_largebatch as lb
made = pickle.loads(sys.stdin.buffer.read())
assert made["and"] == ~lb.matching("bias") & lb.at_least_ndim(2)
assert made["and"] in {~lb.matching("bias") & lb.at_least_ndim(2)}
made["or"] = lb.matching("bias") | ~(lb.matching("kernel") & lb.at_least_ndim(3))
made["stacks by patterns"] = lb.stacked_layers({"layers/": 0, "layers/kernel": 1})
sys.stdout.buffer.write(pickle.dumps(made))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(made), capture_output=True, timeout=120
    )
    assert run.returncode == 0, run.stderr.decode()
    assert pickle.loads(run.stdout) == made


OF_THIS_FILE = ("own", "stacks by a function")
"""These can be unpickled only where this file can be imported."""


def test_static_argument_of_jit():
    traced = []

    @functools.partial(jax.jit, static_argnames=("mask", "stacked"))
    def same(x, mask, stacked):
        traced.append(mask)
        return x

    for patterns in ("bias", "bias", "kernel"):
        same(1.0, ~lb.matching(patterns), lb.stacked_layers({"layers/": 0}))
    assert traced == [~lb.matching("bias"), ~lb.matching("kernel")]
