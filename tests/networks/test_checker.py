"""The checker of networks sees each fault, and reads messages as a user does."""

import pytest

import optax_largebatch as lb
from tests.networks.network import NAMES, Network
from tests.networks.verdicts import Trial, trial, verdict

QUERY = "(query|key|value)/kernel"
STACK = {"qkv/kernel": ((0, 1), 2)}
TURNED = {QUERY: ((0, 1), 2)}
FAULTS = {
    "a stack has one norm": ("maxtext_llama_scan1", "lamb", {"stacked": {}}),
    "an array is cut": ("ppo_purejaxrl", "lamb", {"stacked": {"Dense_1/kernel": 0}}),
    "a matrix is left to Adam": ("bert_keras_hub", "muon", {"matrix_axes": {QUERY: None}}),
    "a convolution is left to Adam": ("convnext_nnx", "muonh", {"matrix_axes": {"downs": None}}),
    "taken for a matrix: bias": ("bert_keras_hub", "muon", {"matrix_axes": {"query/bias": (0, 1)}}),
    "taken for a matrix: depthwise": ("xlstm", "muonh", {"matrix_axes": {"conv/kernel": (0, 2)}}),
    "taken for a matrix: matrix": ("s5", "muon", {"matrix_axes": {"seq/B": (1, 0)}}),
    "moved by Muon: position": ("bert_keras_hub", "planned_optimizer", {"embeddings": None}),
    "a stack is one matrix": ("flux_maxdiffusion", "muon", {"matrix_axes": STACK}),
    "rows and columns are swapped": ("equinox_mlp", "muon", {"matrix_axes": {"weight": (0, 1)}}),
    "other axes are rows and columns": ("bert_keras_hub", "muonh", {"matrix_axes": TURNED}),
    "a vector is on a sphere": ("bert_keras_hub", "adamh", {"adamh_mask": lb.at_least_ndim(2)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault):
    name, optimizer, wrong = FAULTS[fault]
    network = Network(name)
    result = trial(network, optimizer, network.arguments(optimizer) | wrong)
    assert fault in result.faults, result


def said(*messages):
    """An optimizer that moves every array rightly, and says something at first."""

    def start(network, optimizer, arguments):
        tx = trial(network, optimizer, network.arguments(optimizer)).tx
        return Trial(network, optimizer, tx, [] if arguments else list(messages))

    return start


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("asks", "Say head=None."),
        ("misleading", "Something may be wrong."),
        ("misleading", "Say stacked={'Dense': 0}."),
    ],
)
def test_a_message_that_is_not_needed(monkeypatch, kind, message):
    monkeypatch.setattr("tests.networks.verdicts.trial", said(message))
    network = Network("ppo_purejaxrl")
    assert verdict(network, "planned_optimizer").kind == kind


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_is_whole(name):
    network = Network(name)
    assert all(len(leaf.shape) == len(leaf.axes) for leaf in network.leaves)
    assert len({leaf.name for leaf in network.leaves}) == len(network.leaves)
