"""Selects parameters by their kind: biases, normalisations, tensors of one axis."""

import dataclasses
import re
from typing import Any

from optax_largebatch.params.rules import Rule

_END = r"(/\d+)*$"
"""The end of a name. Arrays in a list are of the kind that the list is called."""
_NAMES = {
    "bias": rf"(^|/)(bias|b){_END}",
    "norm": rf"(^|/)(scale|gamma|beta){_END}|norm[^/]*/|(^|/)(bn|ln)(_[^/]*|\d*)(/|$)"
    rf"|norm(_?\d+|_(scale|weight|gain|bias))?{_END}",
    "position": r"pos(ition)?(al)?_?emb",
    "token": rf"(^|/)(cls|class)(_?token)?{_END}",
}
_AXES = {"vector": 1, "scalar": 0}
KINDS = (*_NAMES, *_AXES)
"""The kinds of parameters that `matching_kinds` knows."""


def matching_kinds(*kinds: str) -> Rule:
    r"""Selects the parameters of one or more kinds.

    Unlike `matching`, it works for all networks that follow the names of Flax, Haiku or Equinox. To
    leave them out, write `~matching_kinds("bias", "norm")`.
    The kinds are

    - `"bias"`: called `bias` or `b`;
    - `"norm"`: called `scale`, `gamma` or `beta`; in a module whose name has `norm` in it; an array
      whose name ends with it, as `final_rmsnorm`, `norm1` or `norm_scale`; and all that is, or is
      in, `bn` or `ln`, as `ln1` and `ln_f`;
    - `"vector"`: of exactly one axis;
    - `"scalar"`: of no axes;
    - `"position"`: a position embedding, such as `pos_embedding`;
    - `"token"`: a class token, such as `cls`.

    A bias may have two axes, as in Flax's attention, where it has one in PyTorch: there, `"vector"`
    alone would miss it. Indices at the end of a name do not count: the arrays of a list that is
    called `bias` are biases.

    Args:
        *kinds: at least one.

    Returns:
        A rule, for any argument that takes a mask.

    Raises:
        ValueError: no kind is given, or an unknown one; or, when the rule meets the parameters,
            none of them is of these kinds.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import matching_kinds
        >>> params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
        >>> matching_kinds("bias", "norm").mask(params)
        {'dense': {'bias': True, 'kernel': False}}
        >>> (~matching_kinds("bias", "norm")).mask(params)
        {'dense': {'bias': False, 'kernel': True}}
    """
    return Rule(_said("matching_kinds", kinds), _OfKinds(kinds))


@dataclasses.dataclass(frozen=True)
class _OfKinds:
    kinds: tuple[str, ...]

    def __call__(self, named: list[tuple[str, Any]]) -> list[bool]:
        selected = [any(_is_of(kind, name, leaf) for kind in self.kinds) for name, leaf in named]
        known = all(hasattr(leaf, "ndim") for _, leaf in named)  # not hidden, no placeholder
        if named and known and not any(selected):
            names = ", ".join(name for name, _ in named[:12])
            raise ValueError(
                f"no parameter is of the kinds {', '.join(self.kinds)}. The names are: "
                f"{names}{', ...' if len(named) > 12 else ''}. Select by name with matching(...), "
                f"or select all."
            )
        return selected


def _said(function: str, kinds: tuple[str, ...]) -> str:
    """The call as it is written, after checking its arguments."""
    listed = ", ".join(map(repr, kinds))
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise ValueError(
            f"{function}() needs one or more of {', '.join(map(repr, KINDS))}; got "
            f"{listed or 'nothing'}."
        )
    return f"{function}({listed})"


def _is_of(kind: str, name: str, leaf: Any) -> bool:
    if kind in _AXES:
        return getattr(leaf, "ndim", None) == _AXES[kind]
    return re.search(_NAMES[kind], name, re.IGNORECASE) is not None
