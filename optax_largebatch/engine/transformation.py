"""Links as the transformations of optax."""

import dataclasses
from typing import Any

import optax

from optax_largebatch.engine.link import Link
from optax_largebatch.engine.passes import LeafArrays, Passes
from optax_largebatch.engine.scalars import Scalars
from optax_largebatch.engine.shards import on_shards
from optax_largebatch.params.leaves import gradients_of, leaves_of


def transformation(link: Link) -> optax.GradientTransformationExtraArgs:
    """The link as an optax transformation of its own; `link_of` finds the link again."""
    bound = _BoundLink(link, Passes(link))
    return optax.GradientTransformationExtraArgs(bound.init, bound.update)


def link_of(transform: optax.GradientTransformation) -> Link | None:
    """The link that a transformation was made of, or None for a foreign transformation."""
    owner = getattr(transform.update, "__self__", None)
    return owner.link if isinstance(owner, _BoundLink) else None


@dataclasses.dataclass(frozen=True)
class _BoundLink:
    """The `init` and `update` of a link."""

    link: Link
    passes: Passes

    def init(self, params: optax.Params) -> optax.OptState:
        self.link.choices(leaves_of("params", params))
        return self.link.init(params)

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        partition_specs: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del extra_args
        link = self.link
        if params is None and link.needs_params:
            raise ValueError(
                "params must be given to `update`, because this transformation depends on the "
                "parameters; got None. Call optimizer.update(grads, state, params)."
            )
        leaves, gradients = gradients_of(updates, params, partition_specs)
        states = link.split(state, leaves)
        arrays = {
            index: LeafArrays(
                gradient, None if params is None else leaves.arrays[index], states[index]
            )
            for index, gradient in enumerate(gradients)
            if gradient is not None
        }
        choices = link.choices(leaves)
        results = on_shards(
            link,
            lambda arrays, scalars, split: self.passes.run(arrays, scalars, choices, split),
            arrays,
            Scalars(link.scalars(state)),
            leaves,
        )
        for index, (update, part) in results.items():
            gradients[index] = update.astype(leaves.arrays[index].dtype)
            states[index] = part
        return leaves.rebuild(gradients), link.join(state, states, leaves)
