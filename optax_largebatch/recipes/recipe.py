"""A recipe: the numbers of one run, and its optimizer and schedule."""

import dataclasses
import itertools
from typing import Any

import jax
import optax

from optax_largebatch.params.masks import Mask
from optax_largebatch.params.matrix_axes import MatrixAxes
from optax_largebatch.params.rules import Rule
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.recipes.building import optimizer_call, schedule_call
from optax_largebatch.recipes.building_muon import muon_call
from optax_largebatch.recipes.calls import Call, given, program
from optax_largebatch.recipes.settings import Group, Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """The settings of one run at one batch size, as `get` returns them.

    Settings that an algorithm does not have are None.
    """

    def schedule(self) -> optax.Schedule:
        """The learning rate: step (0 first) to value."""
        return schedule_call(self)()

    def optimizer(
        self,
        params: Any = None,
        *,
        mask: Mask = None,
        embeddings: Rule | None = None,
        head: Rule | None = None,
        matrix_axes: MatrixAxes = None,
        stacked: Stacks = None,
    ) -> optax.GradientTransformationExtraArgs:
        """The optimizer, with its schedule.

        Args:
            params: the parameters, or their shapes from `jax.eval_shape`. If given, it is checked
                now, and not at the first `init`, that the parameters include the kinds that the
                recipe excludes. `optax_largebatch.explain` lists them.
            mask: the parameters that are decayed and adapted; None for all except the kinds in
                `not_decayed` and `not_adapted`. Recipes of Muon, MuonH and ScaledAdam have none.
            embeddings: for Muon and MuonH, the embeddings and whatever else `note` names with them;
                None for `matching("embed")`.
            head: for Muon and MuonH, the last layer; None for `matching("head")`. If it is tied to
                the embeddings, give both the same rule; the settings of embeddings then apply.
            matrix_axes: for Muon and MuonH, the rows and columns of matrices with more than two
                axes, as of convolutions: `{"conv/kernel": ((0, 1, 2), 3)}`; see
                `orthogonalize_momentum`.
            stacked: the parameters that stack layers, from `stacked_layers`, or None.

        Returns:
            The optimizer. Its `update` needs the parameters.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: the recipe excludes kinds of which there are no parameters, a pattern
                matches none, or an argument belongs to recipes of another kind.

        Examples:
            >>> import jax.numpy as jnp
            >>> from optax_largebatch import recipes
            >>> kernel = jnp.array([3.0, -4.0])
            >>> params = {"kernel": kernel, "bias": jnp.zeros(2), "scale": jnp.ones(2)}
            >>> recipe = recipes.get("bert-large/lamb/mlperf", batch_size=256)
            >>> optimizer = recipe.optimizer(params)
            >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
            >>> length = jnp.linalg.norm(updates["kernel"]) / jnp.linalg.norm(kernel)
            >>> print(f"{length:.6f}")
            0.000350
        """
        of_muon = given(embeddings=embeddings, head=head, matrix_axes=matrix_axes)
        optimizer = self._call(mask, stacked, **of_muon)()
        if params is not None:
            jax.eval_shape(optimizer.init, params)
        return optimizer

    def code(self) -> str:
        """The optimizer as Python code, to copy and change."""
        return program(self._call())

    def summary(self) -> str:
        """The recipe in a few readable lines, with the settings that are not the default ones."""
        batch = f"{self.batch_size}"
        if self.sequence_length is not None:
            tokens = self.batch_size * self.sequence_length
            batch += f" (sequences of {self.sequence_length}: {tokens} tokens)"
        fields = dataclasses.fields(self)
        settings = [
            f"{field.name} {_in_words(getattr(self, field.name))}"
            for field in itertools.dropwhile(lambda field: field.name != "algorithm", fields)
            if getattr(self, field.name) != field.default
        ]
        lines = {
            "Numbers": self.origin,
            "Settings": ", ".join(settings),
            "Reached": self.result,
            "Note": self.note.removesuffix("."),
            "Source": self.source,
        }
        title = f"{self.name} at batch size {batch}: {self.task}."
        return "\n".join([title, *(f"  {name}:  {text}." for name, text in lines.items() if text)])

    def _call(
        self,
        mask: Mask = None,
        stacked: Stacks = None,
        **of_muon: Any,
    ) -> Call:
        """The call of the optimizer, for arguments that fit the recipe."""
        if self.rest is None and of_muon:
            name, value = of_muon.popitem()
            raise ValueError(
                f"{name} must be None for {self.name!r}, which is no recipe of Muon; got {value!r}."
            )
        if mask is not None and (self.rest is not None or self.algorithm == "scaled_adam"):
            raise ValueError(
                f"mask must be None for {self.name!r}, got {mask!r}. Which parameters Muon does "
                f"not move, embeddings=matching(...) and head=matching(...) say."
            )
        if self.rest is not None:
            for name in of_muon.keys() - {"matrix_axes"}:
                _check_rule(name, of_muon[name], "such as matching('embed'), or None")
            return muon_call(self, **of_muon, stacked=stacked)
        if self.bias_learning_rate is not None and mask is not None:
            why = f"such as ~matching(...), for {self.name!r}, whose biases have their own rate"
            _check_rule("mask", mask, why)
        return optimizer_call(self, mask, stacked)


def _check_rule(name: str, value: Any, allowed: str) -> None:
    if not isinstance(value, Rule):
        raise TypeError(
            f"{name} must be a rule, {allowed}; got {value!r} of type {type(value).__name__}."
        )


def _in_words(value: Any) -> str:
    if isinstance(value, Group):
        rate = "that of the matrices" if value.learning_rate is None else value.learning_rate
        return f"(learning_rate {_in_words(rate)}, weight_decay {value.weight_decay:g})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_in_words, value))})" if value else "nothing"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
