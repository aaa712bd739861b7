"""What becomes of a user who gives a network to an optimizer and reads its messages.

A verdict is one of

- right: nothing is said, and each array is moved as the network's author would have it;
- asks: an error or a warning says what to write, and with that each array is moved rightly;
- silent: an array is moved wrongly, and no message helps;
- misleading: it asks for something wrong, or says something although nothing is wrong;
- crash: an error that says nothing that can be done.
"""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple
import warnings

import jax
import optax

import optax_largebatch as lb
from tests.networks.advice import followed
from tests.networks.faults import faults
from tests.networks.network import Network

MESSAGES = 6
"""How many messages a user follows, one after the other."""


@dataclasses.dataclass
class Trial:
    """What an optimizer says of a network, and what it would do."""

    network: Network
    optimizer: str
    tx: optax.GradientTransformation | None
    """None after an error."""
    messages: list[str]
    """The error, or the warnings."""

    @functools.cached_property
    def faults(self):
        """The arrays that are moved wrongly, by what is wrong; empty after an error."""
        if self.tx is None:
            return {}
        moved = lb.explain(self.tx, self.network.shapes).parameters
        wrong = collections.defaultdict(list)
        for leaf, fact in zip(self.network.leaves, moved, strict=True):
            for fault in faults(self.optimizer, leaf, fact):
                wrong[fault].append(leaf.name)
        return dict(wrong)

    @property
    def is_right(self):
        return self.tx is not None and not self.faults

    def __str__(self):
        wrong = [f"{what}: {len(names)}, as {names[0]}" for what, names in self.faults.items()]
        return "\n".join([*wrong, *(f"it says: {text}" for text in self.messages)])


class Verdict(NamedTuple):
    """What becomes of a network with an optimizer."""

    kind: str
    arguments: dict[str, Any]
    """What the user has written in the end."""
    why: str

    @property
    def is_good(self):
        return self.kind in ("right", "asks")


def verdict(network, optimizer):
    """What becomes of a network with an optimizer, by its name."""
    arguments = {}
    last = trial(network, optimizer, arguments)
    for _ in range(MESSAGES):
        new = _followed(network, optimizer, last, arguments)
        if new is None:
            break
        arguments, last = new, trial(network, optimizer, new)
    why = f"with {arguments}\n{last}"
    if last.tx is None:
        return Verdict("misleading" if arguments else "crash", arguments, why)
    if last.faults:
        has_no_stacks = not network.should["stacked"] and arguments.get("stacked")
        is_led_astray = has_no_stacks or "an array is cut" in last.faults
        return Verdict("misleading" if is_led_astray else "silent", arguments, why)
    if last.messages:
        return Verdict("misleading", arguments, f"nothing is wrong\n{why}")
    if arguments.get("stacked") and trial(network, optimizer, arguments | {"stacked": {}}).is_right:
        return Verdict("misleading", arguments, f"nothing needs to be stacked\n{why}")
    return Verdict("asks" if arguments else "right", arguments, why)


def _followed(network, optimizer, last, arguments):
    """The arguments after the first message that says what to do."""
    for message in last.messages:
        new = followed(message, arguments, network.arguments(optimizer))
        if new is not None:
            return new
    return None


def trial(network, optimizer, arguments):
    """Starts an optimizer with the shapes of a network."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            tx = _built(optimizer, network.shapes, arguments)
            if optimizer != "planned_optimizer":  # it has traced `init` itself
                jax.eval_shape(tx.init, network.shapes)
        except Exception as error:
            return Trial(network, optimizer, None, [f"{type(error).__name__}: {error}"])
    texts = [
        str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)
    ]
    return Trial(network, optimizer, tx, list(dict.fromkeys(texts)))


def _built(optimizer, params, arguments):
    if optimizer == "planned_optimizer":
        return lb.planned_optimizer(_plan(), params, **arguments)
    return getattr(lb, optimizer)(0.01, **arguments)


@functools.cache
def _plan():
    rate = lb.PlannedRate(3e-4, warmup="1M", decay="cosine")
    run = lb.TunedRun("adamw", batch_size=512, total="51M", learning_rate=rate, weight_decay=0.05)
    return lb.batch_plan("0:512 1M:4096 10M:16384", total="77M", run=run.to("muonh"))
