"""A recipe: the numbers of one run, and its optimizer and schedule."""

import dataclasses
from typing import Any

import jax
import optax

from optax_largebatch.params.masks import Mask
from optax_largebatch.params.matrices import MatrixAxes
from optax_largebatch.params.rules import Rule
from optax_largebatch.params.stacked import Stacks
from optax_largebatch.recipes import muon_calls
from optax_largebatch.recipes.building import (
    ARGUMENTS,
    optimizer_call,
    schedule_call,
    spared,
)
from optax_largebatch.recipes.calls import Call, Method, Variable
from optax_largebatch.recipes.muon_calls import Places
from optax_largebatch.recipes.settings import Group, Settings

_OF_MATRICES = ("momentum", "weight_decay", "consistent_rms", "max_grad_norm")
"""The numbers of a recipe of Muon that its summary lists."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """The settings of one run at one batch size, as `get` returns them.

    Settings that an algorithm does not have are None.
    """

    def schedule(self) -> optax.Schedule:
        """The learning rate: step (0 first) to value."""
        return schedule_call(self, self.learning_rate)()

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
                `not_decayed` and `not_adapted`. Recipes of Muon and MuonH have none.
            embeddings: for Muon and MuonH, the embeddings and whatever else `note` names with them;
                None for `matching("embed")`.
            head: for Muon and MuonH, the last layer; None for `matching("head")`. If it is tied to
                the embeddings, give both the same rule; the settings of embeddings then apply.
            matrix_axes: for Muon and MuonH, the rows and columns of matrices with more than two
                axes, see `orthogonalize_momentum`; and None for biases with two axes, as in Flax's
                attention: `{"query/kernel": (0, (1, 2)), "query/bias": None}`.
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
        places = self._places(mask, embeddings, head, matrix_axes)
        if places is not None:
            optimizer = muon_calls.optimizer_call(self, places, stacked, matrix_axes)()
        else:
            optimizer = optimizer_call(self, *self._masks(mask), stacked)()
        if params is not None:
            jax.eval_shape(optimizer.init, params)
        return optimizer

    def code(self) -> str:
        """The optimizer as Python code, to copy and change."""
        places = self._places()
        if places is not None:
            optimizer = muon_calls.optimizer_call(self, places)
        else:
            optimizer = optimizer_call(self, *self._masks(None))
        assigned = "".join(f"{one.name} = {one.call.code()}\n" for one in _variables(optimizer))
        imports = "import optax\n" if "optax." in assigned else ""
        imports += "import optax_largebatch as lb\n"
        return f"{imports}\n{assigned}optimizer = {optimizer.code()}"

    def summary(self) -> str:
        """The recipe in a few readable lines."""
        arguments = ARGUMENTS | dict.fromkeys(("muon", "muonh"), _OF_MATRICES)
        values = {name: getattr(self, name) for name in arguments[self.algorithm]}
        if self.algorithm == "muonh":
            del values["weight_decay"]
        numbers = {"learning_rate": self.learning_rate}
        if self.bias_learning_rate is not None:
            numbers["bias_learning_rate"] = self.bias_learning_rate
        numbers |= {name: value for name, value in values.items() if type(value) in (int, float)}
        listed = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        title = {"muon": "Muon", "muonh": "MuonH"}.get(self.algorithm, self.algorithm.upper())
        excluded = self._excluded_in_words()
        lines = [
            f"{self.name} at batch size {self._batch_in_words()}: {self.task}.",
            f"  Numbers:  {self.origin}.",
            f"  {title}:  {listed}.",
            f"  Schedule:  {self._schedule_in_words()}.",
            f"  Excluded:  {excluded}." if self.rest is None else self._others_in_words(),
        ]
        if self.result is not None:
            lines.append(f"  Reached:  {self.result}.")
        return "\n".join([*lines, f"  Note:  {self.note}", f"  Source:  {self.source}."])

    def _places(
        self,
        mask: Mask = None,
        embeddings: Rule | None = None,
        head: Rule | None = None,
        matrix_axes: MatrixAxes = None,
    ) -> Places | None:
        """The embeddings and the last layer, checked; None without Muon."""
        given = {"embeddings": embeddings, "head": head, "matrix_axes": matrix_axes}
        if self.rest is None:
            for name, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"{name} must be None for {self.name!r}, which is no recipe of Muon; got "
                        f"{value!r}."
                    )
            return None
        if mask is not None:
            raise ValueError(
                f"mask must be None for {self.name!r}, got {mask!r}. Which parameters Muon does "
                f"not move, embeddings=matching(...) and head=matching(...) say."
            )
        for name, value in (("embeddings", embeddings), ("head", head)):
            if value is not None and not isinstance(value, Rule):
                raise TypeError(
                    f"{name} must be a rule, such as matching('embed'), or None; got {value!r} of "
                    f"type {type(value).__name__}."
                )
        return Places(embeddings, head)

    def _masks(self, mask: Mask) -> tuple[Any, Any]:
        """The masks of weight decay and of adaptation."""
        if mask is None:
            return spared(self.not_decayed), spared(self.not_adapted)
        if self.bias_learning_rate is not None and not isinstance(mask, Rule):
            raise TypeError(
                f"mask must be a rule for {self.name!r}, where what it leaves out has a learning "
                f"rate of its own; got {mask!r}. Give ~matching(...) or ~matching_kinds(...)."
            )
        return mask, mask

    def _batch_in_words(self) -> str:
        if self.sequence_length is None:
            return str(self.batch_size)
        tokens = self.batch_size * self.sequence_length
        return f"{self.batch_size} (sequences of {self.sequence_length}: {tokens} tokens)"

    def _others_in_words(self) -> str:
        """The settings of the parameters that Muon does not move."""
        assert self.rest is not None
        parts = [f"{name} {self._group_in_words(group)}" for name, group in self._groups()]
        if self.head_on_sphere:
            parts.append("the last layer AdamH at the rate of the matrices")
        moments = f"b1 {self.b1:g}, b2 {self.b2:g}, eps {self.eps:g}"
        return f"  AdamW:  {moments}; {'; '.join(parts)}."

    def _groups(self) -> list[tuple[str, Group]]:
        found = [("embeddings", self.embeddings), ("the last layer", self.head)]
        named = [(name, group) for name, group in found if group is not None]
        assert self.rest is not None
        return [*named, ("all others" if not named else "the rest", self.rest)]

    def _group_in_words(self, group: Group) -> str:
        rate = "the rate of the matrices"
        if group.learning_rate is not None:
            rate = f"learning_rate {group.learning_rate:.6g}"
        if self.others_hold_steps is not None:
            rate += f" (held for {self.others_hold_steps} steps)"
        return f"{rate}, weight_decay {group.weight_decay:g}"

    def _schedule_in_words(self) -> str:
        warmup = f"{self.warmup_steps} steps of warm-up" if self.warmup_steps else "no warm-up"
        if self.warmup_begin_step:
            warmup += f", {-self.warmup_begin_step} of them before training begins"
        parts = [warmup]
        if self.hold_steps:
            parts.append(f"{self.hold_steps} steps of hold")
        parts.append(self._decay_in_words())
        if self.steps_per_stair:
            parts.append(f"changed every {self.steps_per_stair} steps")
        return f"{', '.join(parts)}, {self.total_steps} steps in all"

    def _decay_in_words(self) -> str:
        if self.decay == "constant":
            return "then constant"
        if self.decay == "inverse_sqrt":
            return "decay with the inverse root of the step"
        if self.decay == "drops":
            assert self.drops is not None
            steps = ", ".join(str(round(part * self.total_steps)) for part in self.drops)
            return f"a tenth of the rate after steps {steps}"
        if self.decay == "exponential":
            decay = f"then {self.decay_rate:g} of the rate in each epoch"
        elif self.decay == "cosine":
            decay = "half a cosine"
        elif self.decay == "polynomial":
            decay = f"decay with power {self.power:g}"
        else:
            decay = "linear decay"
        if self.decay_from_start:
            decay += " counted from step 0"
        return f"{decay} to {self.end_value:g}" if self.end_value else decay

    def _excluded_in_words(self) -> str:
        decayed, adapted = (
            ", ".join(kinds) or "nothing" for kinds in (self.not_decayed, self.not_adapted)
        )
        if decayed == adapted:
            return f"{decayed}, from decay and adaptation"
        return f"{decayed} from decay, {adapted} from adaptation"


def _variables(optimizer: Call) -> list[Variable]:
    """The variables of a call, in the order in which they come."""
    found: list[Variable] = []

    def look(argument: Any) -> None:
        if isinstance(argument, Variable):
            look(argument.call)
            if argument not in found:
                found.append(argument)
        elif isinstance(argument, Method):
            look(argument.of)
            look(list(argument.arguments))
        elif isinstance(argument, list):
            for one in argument:
                look(one)
        elif isinstance(argument, dict):
            for one in argument.values():
                look(one)
        elif isinstance(argument, Call):
            for one in (*argument.arguments, *argument.named.values()):
                look(one)

    look(optimizer)
    return found
