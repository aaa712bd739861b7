"""Every recorded run of a peer, reproduced over all its steps."""

import collections
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden
from tests.golden import muon_peers
from tests.helpers import trajectory


def cases(dtype):
    """The runs in a dtype; of those that are left to the slow tests, each is marked."""
    own = [case for case in golden.cases() if case.dtype == dtype]
    return [pytest.param(x, marks=[pytest.mark.slow] * golden.is_long(x), id=repr(x)) for x in own]


class Difference(NamedTuple):
    """An error of a parameter, over the largest value of its leaf."""

    size: float
    leaf: str
    step: int


def largest_difference(case, dtype):
    """The largest error at any step."""
    params, grads = jax.tree.map(lambda x: jnp.asarray(x, dtype), (case.params, case.grads))
    ours = trajectory(case.optimizer, params, grads)

    def difference(path, own, theirs):
        largest = np.abs(theirs).max() or 1.0  # a leaf may stay at zero
        errors = np.abs(np.asarray(own) - theirs).reshape(len(theirs), -1).max(axis=1) / largest
        return Difference(float(errors.max()), jax.tree_util.keystr(path), int(errors.argmax()))

    found = jax.tree.map_with_path(difference, ours, case.trajectory)
    return max(jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, Difference)))


def assert_close(case, dtype, limit):
    """Raises an error that names the leaf and the step, the first of which is 0."""
    found = largest_difference(case, dtype)
    assert found.size < limit, found


def test_all_cases_are_here():
    counts = collections.Counter(case.peer for case in golden.cases())
    assert counts == {
        "mxnet_2_0_0b1": 32,
        "mxnet_1_9_1": 10,
        "torch_peers": 12,
        "tensorflow_peers": 8,
        "keras": 4,
        "icefall": 12,
        "vision_peers": 50,
        "muon_peers": 58,
    }


def test_every_dialect_of_muon_is_replayed_or_says_why_not():
    """A dialect or a run that is recorded later has to be one or the other, and not both."""
    recorded = json.loads((golden.HERE / "muon_peers.json").read_text())
    replayed, left_out = muon_peers.DIALECTS, muon_peers.NOT_REPLAYED
    assert replayed.keys() ^ left_out.keys() == recorded["dialects"].keys()
    runs = {name for name, case in recorded["cases"].items() if muon_peers.reason(name, case)}
    here = {case.name for case in golden.cases() if case.peer == "muon_peers"}
    assert runs ^ here == recorded["cases"].keys()
    assert muon_peers.RUNS_NOT_REPLAYED.keys() <= runs
    of_left_out = [x for x in recorded["cases"].values() if x["dialect"] in left_out]
    assert len(runs) == len(of_left_out) + len(muon_peers.RUNS_NOT_REPLAYED)


@pytest.mark.parametrize("case", cases("float32"))
def test_float32_peers_in_float32(case):
    limit = 1e-5 if case.peer == "muon_peers" else 2e-5
    assert_close(case, "float32", limit)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("float32"))
def test_float32_peers_in_float64(case, x64):
    # NVIDIA's TensorFlow code rounds 1 - b^t itself, which is 1e-5 of it.
    limit = 2e-5 if case.name.startswith("nvidia_bert_tf") else 1e-5
    assert_close(case, "float64", limit)


@pytest.mark.parametrize("case", cases("float64"))
def test_float64_peers(case, x64):
    assert_close(case, "float64", 1e-11)
