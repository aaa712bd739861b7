"""What a momentum buffer sums."""

from collections import OrderedDict
from typing import Any, NamedTuple

import optax

from optax_largebatch.adoption.parts import BUFFERS, parts
from optax_largebatch.transforms.lars import ScaleByLarsState
from optax_largebatch.transforms.learning_rate import ScaleByLearningRateState
from optax_largebatch.transforms.momentum import AccumulateMomentumState
from optax_largebatch.transforms.trust_ratio import ScaleByTrustRatioState
from optax_largebatch.transforms.warmed_up_rate import ScaleByWarmedUpRateState

_RATIOS = (ScaleByLarsState, ScaleByTrustRatioState)
_RATES = (ScaleByLearningRateState, ScaleByWarmedUpRateState, optax.ScaleByScheduleState)
_MAY_BE_RATES = (*_RATES, optax.EmptyState, optax.schedules.InjectStatefulHyperparamsState)


class Momentum(NamedTuple):
    """What a momentum buffer sums."""

    of_ratios: bool
    """Gradients times trust ratios."""
    of_rates: bool
    """Gradients times learning rates."""

    def __str__(self) -> str:
        factors = ["trust ratios"] * self.of_ratios + ["learning rates"] * self.of_rates
        return " times ".join(["gradients", *factors])


def check_same_momentum(old: Any, new: Any) -> None:
    """Checks that the momentum buffers of two states sum the same, as far as the states say."""
    if _momentum(old) != _momentum(new):
        raise ValueError(
            "state must have a momentum of the same kind: by the order of its links, state has one "
            f"of {_momentum(old)}, and optimizer has one of {_momentum(new)}. The momentum of "
            "optax.sgd fits chain(accumulate_momentum(0.9), "
            "scale_by_trust_ratio(trust_coefficient=0.001), scale_by_learning_rate(...)), and that "
            "of optax.lars fits lars(...). If you know that the two are the same, pass "
            "old_optimizer, which compares the buffers themselves: a constant learning rate of "
            "optax leaves nothing in a state."
        )


def _momentum(state: Any) -> Momentum | None:
    """What the momentum buffer in a state sums, None if there is none.

    Links of optax that keep nothing, such as a constant learning rate, can only be told by their
    place. Two that are masked, one more and then momentum is `optax.lars`. In other chains of
    optax, the learning rate is taken to be behind the momentum, unless nothing there can be one.
    """
    links = _links(state)
    at = next((at for at, link in enumerate(links) if isinstance(link, BUFFERS)), None)
    if at is None:
        return None
    before, after = links[:at], links[at + 1 :]
    ratios = any(isinstance(link, _RATIOS) for link in before)
    rates = any(isinstance(link, _RATES) for link in before)
    if isinstance(links[at], AccumulateMomentumState):
        return Momentum(ratios, rates)
    masked = [isinstance(link, optax.MaskedState) for link in before[-3:]]
    lars = masked == [True, True, False]
    none_behind = not any(isinstance(link, _MAY_BE_RATES) for link in after)
    return Momentum(ratios or lars, rates or lars or (bool(before) and none_behind))


def _links(node: Any) -> list[Any]:
    """The links of a chain in their order, without the chains and wrappers around the buffer.

    Raises:
        ValueError: the links are in a dictionary, which has no order.
    """
    if isinstance(node, BUFFERS):
        return [node]
    if isinstance(node, OrderedDict):  # of optax.named_chain
        node = tuple(node.values())
    if isinstance(node, tuple | list) and not hasattr(node, "_fields"):
        return [link for part in node for link in _links(part)]
    if isinstance(node, optax.transforms.PartitionState):
        node = tuple(node.inner_states.values())
    below = node.values() if isinstance(node, dict) else node if isinstance(node, tuple) else ()
    holding = [part for part in below if any(isinstance(one, BUFFERS) for one in parts(part))]
    if holding and isinstance(node, dict) and len(node) > 1:
        raise ValueError(
            "old_optimizer must be given: a momentum is in a dictionary of "
            f"{', '.join(map(repr, node))}, and nothing says which of them comes first. (Older "
            "versions of optax.named_chain return one.)"
        )
    return _links(holding[0]) if holding else [node]
