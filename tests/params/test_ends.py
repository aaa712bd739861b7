"""Embeddings and the last layer: by known names, by the length of a table of words, or asked."""

import jax
import jax.numpy as jnp
import pytest

import optax_largebatch as lb
from optax_largebatch.params.ends import between_ends
from optax_largebatch.plans.tuned_run import FAMILIES
from tests.params.selection import selected, shapes

LAYER = {"up": {"kernel": (8, 32)}, "down": {"kernel": (32, 8)}}


def ends(tree, embeddings="by name", head="by name"):
    """The names of what is at the ends."""
    return selected(~between_ends(embeddings, head), shapes(tree))


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"embed": (99, 8), "h": LAYER, "lm_head": (8, 99)}, {"embed", "lm_head"}),
        ({"wte": (99, 8), "wpe": (16, 8), "h": LAYER}, {"wte", "wpe"}),
        ({"wte": (99, 8), "h": LAYER, "ff_out": {"kernel": (8, 99)}}, {"wte", "ff_out/kernel"}),
        ({"positions": (16, 8), "h": LAYER, "classifier": (8, 3)}, {"positions", "classifier"}),
        ({"pre_logits": {"w": (8, 8)}, "h": LAYER, "logits_dense": (8, 3)}, {"logits_dense"}),
        ({"time_emb_proj": {"kernel": (8, 8)}, "h": LAYER, "head": (8, 3)}, {"head"}),
        ({"q": {"lora_a": (99, 2), "lora_b": (2, 8)}}, set()),
        ({"h": LAYER}, set()),
        ({"embed": (32, 8), "h": LAYER, "head": (8, 32)}, {"embed", "head"}),
        ({"embed": (32, 8), "h": LAYER}, {"embed"}),  # as many words as inner channels
        ({"multi_head": LAYER, "fc": {"kernel": (8, 3)}, "h": {"fc": (8, 8)}}, {"fc/kernel"}),
    ],
)
def test_by_name(tree, expected):
    assert ends(tree) == expected


@pytest.mark.parametrize(
    ("tree", "asks", "such_as"),
    [
        ({"layers": [{"kernel": (8, 9)}, {"kernel": (9, 3)}]}, "head", "layers/1/kernel"),
        ({"z": (6, 8), "mlp": LAYER, "readout": (8, 3)}, "embeddings", "z"),
        ({"table": {"x": (99, 8)}, "mlp": LAYER, "head": (8, 3)}, "embeddings", "table/x"),
    ],
)
def test_asks_where_a_matrix_may_be_an_end(tree, asks, such_as):
    with pytest.raises(ValueError, match=f"^{asks} must be given: .*'{such_as}'"):
        ends(tree)
    assert ends(tree, **{asks: None}) == ends(tree, **{asks: lb.matching(such_as)}) - {such_as}


def test_a_network_without_biases_and_scales():
    """The rule that leaves vectors out is chosen here, so it may select nothing."""
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), shapes({"embed": (99, 8), "h": LAYER}))
    for family in FAMILIES:
        decay = 0.1 * (family not in ("muonh", "adamh"))
        run = lb.TunedRun(family, batch_size=8, total=800, learning_rate=0.1, weight_decay=decay)
        plan = lb.batch_plan(16, total=800, run=run)
        lb.planned_optimizer(plan, ones).init(ones)
        for rule in (lambda params: False, ~lb.at_least_ndim(0), {"embed": True, "h": False}):
            lb.planned_optimizer(plan, ones, not_decayed=rule).init(ones)
        with pytest.raises(
            ValueError, match="not_decayed: the pattern 'bias' matches no parameter"
        ):
            lb.planned_optimizer(plan, ones, not_decayed=lb.matching("bias"))
