"""Several links as one: what a chain and a sum of branches have in common."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax

from optax_largebatch.engine.link import Leaf, LeafProgram, Link
from optax_largebatch.params.leaves import Leaves


@dataclasses.dataclass(frozen=True)
class SeveralLinks(Link):
    """Links that run as one; its state, scalars and choices are the tuples of theirs."""

    links: Sequence[Link] = ()

    @classmethod
    def of(
        cls, links: Sequence[Link], leaf: Callable[[jax.Array, Leaf], LeafProgram]
    ) -> "SeveralLinks":
        """The link whose leaf program `leaf` runs those of `links`, `each_at` its place."""
        return cls(
            init=lambda params: tuple(link.init(params) for link in links),
            leaf=leaf,
            scalars=lambda state: tuple(
                link.scalars(own) for link, own in zip(links, state, strict=True)
            ),
            choices=lambda leaves: list(
                zip(*(link.choices(leaves) for link in links), strict=True)
            ),
            needs_params=any(link.needs_params for link in links),
            by_element=all(link.by_element for link in links),
            links=tuple(links),
        )

    def split(self, state: Any, leaves: Leaves) -> list[Any]:
        """The state of each leaf: a tuple of those of the links."""
        columns = (link.split(own, leaves) for link, own in zip(self.links, state, strict=True))
        return list(zip(*columns, strict=True))

    def like_leaf(self, part: Any) -> Any:
        """For each array in the state of a leaf, whether it is laid out as the leaf is."""
        return tuple(link.like_leaf(own) for link, own in zip(self.links, part, strict=True))

    def join(self, state: Any, parts: list[Any], leaves: Leaves) -> Any:
        """The new state: the tuple of those of the links."""
        return tuple(
            link.join(own, [part[index] for part in parts], leaves)
            for index, (link, own) in enumerate(zip(self.links, state, strict=True))
        )


def each_at(at: Leaf) -> list[Leaf]:
    """What each of several links knows of the leaf."""
    own = zip(at.state, at.scalars, at.choice, strict=True)
    return [
        at._replace(state=state, scalars=scalars, choice=choice) for state, scalars, choice in own
    ]
