"""The transformation inside a wrapper."""

from typing import Any

import optax


def check_inner(inner: Any) -> optax.GradientTransformationExtraArgs:
    """The argument `inner` of a wrapper, in a form that takes extra arguments.

    Raises:
        TypeError: `inner` is no gradient transformation.
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"inner must be a gradient transformation, got {inner!r}. Pass an optimizer, such as "
            "lamb(1e-3)."
        )
    return optax.with_extra_args_support(inner)
