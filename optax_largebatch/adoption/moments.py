"""The moments of each parameter, from the part of a state that has them."""

from typing import Any

from jax.core import Tracer
import optax

from optax_largebatch.adoption.hidden import columns
from optax_largebatch.adoption.parts import MEANS, MOMENTS, MUON
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.paths import is_hidden, leaf_names


class Moments:
    """The moments in a state.

    An optimizer of several parts, such as `muon`, shows each parameter to one part, and hides it
    from the others.
    """

    def __init__(self, where: str, leaves: Leaves, parts: list[Any]):
        """Looks each parameter up.

        Args:
            where: whose the moments are, for messages.
            leaves: the parameters.
            parts: the parts of the state.
        """
        self.leaves = leaves
        self.has_twice = False
        """Whether several parts have moments of the same parameter."""
        number = len(leaves.arrays)
        first, second = ([optax.MaskedNode()] * number for _ in range(2))
        self._sources: list[Any] = [None] * number
        for part in parts:
            if not isinstance(part, MEANS):
                continue
            for index, mu in enumerate(columns(leaves, where, part.mu)):
                if not is_hidden(mu):
                    self.has_twice |= self._sources[index] is not None
                    first[index], self._sources[index] = mu, part
            if isinstance(part, MOMENTS):
                for index, nu in enumerate(columns(leaves, where, part.nu)):
                    second[index] = second[index] if is_hidden(nu) else nu
        self.first = leaves.rebuild(first)
        """The first moments, like the parameters. What no part moves is hidden."""
        self.second = leaves.rebuild(second)
        """The second moments, likewise. What Muon moves is hidden, too."""

    def check_second(self, part: Any) -> None:
        """Checks that there are second moments of what a part of another state moves."""
        shown = columns(self.leaves, "the moments of optimizer", part.nu)
        for index, source in enumerate(self._sources):
            if not is_hidden(shown[index]) and isinstance(source, MUON):
                raise ValueError(
                    f"state has no second moment of {leaf_names(self.leaves.tree)[index]!r}: Muon "
                    "moved it and keeps only a first moment, but optimizer moves it by Adam, which "
                    "needs both. Let optimizer move it by Muon (muon(...) and muonh(...) do so "
                    "unless matrix_mask leaves it out), or begin with optimizer.init(params)."
                )

    def count(self, part: Any, otherwise: Any) -> Any:
        """The number of gradients in the moments of what a part of another state moves.

        Args:
            part: the part.
            otherwise: the number if it moves nothing.
        """
        shown = columns(self.leaves, "the moments of optimizer", part.mu)
        pairs = zip(shown, self._sources, strict=True)
        found = [source.count for own, source in pairs if source and not is_hidden(own)]
        if not any(isinstance(number, Tracer) for number in found):
            known = sorted({int(number) for number in found})
            if len(known) > 1:
                raise ValueError(
                    "state must have counted as many steps for all parameters that a "
                    f"{type(part).__name__} of optimizer moves; it has counted {known}. Their bias "
                    "corrections differ, and optimizer has one for all. Begin with "
                    "optimizer.init(params)."
                )
        return found[0] if found else otherwise
