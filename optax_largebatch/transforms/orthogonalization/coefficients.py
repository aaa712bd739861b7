"""The coefficients of Newton-Schulz iterations, by the names that they were published under."""

from collections.abc import Sequence
import itertools
from typing import Any, NamedTuple

import numpy as np

from optax_largebatch.arguments import check_integer

Coefficients = tuple[tuple[float, float, float], ...]
"""The three coefficients of each iteration."""

LARGEST = 1000
"""The bound on coefficients, and on iterations, which are compiled one after the other."""

STANDARD = (3.4445, -4.7750, 2.0315)


class Published(NamedTuple):
    """Coefficients as they were published."""

    coefficients: Coefficients
    steps: int = 5
    """The default number of iterations."""
    begins_again: bool = False
    """Whether the iterations after the last begin again from the first; otherwise the last one is
    repeated."""

    def of(self, steps: int | None) -> Coefficients:
        """The coefficients of so many iterations."""
        number = self.steps if steps is None else steps
        known = self.coefficients
        endless = itertools.cycle(known) if self.begins_again else itertools.repeat(known[-1])
        return tuple(itertools.islice(itertools.chain(known, endless), number))


PUBLISHED = {
    "standard": Published((STANDARD,)),
    "dion": Published(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        begins_again=True,
    ),
    "polar_express": Published(
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
    ),
    "polar_express_raw": Published(
        (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        ),
    ),
    "cans": Published(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
    ),
    "cubic": Published(
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        begins_again=True,
    ),
    "aol": Published(
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        steps=4,
        begins_again=True,
    ),
    "deepseek_v4": Published((*[STANDARD] * 8, *[(2.0, -1.5, 0.5)] * 2), steps=10),
}
"""Coefficients of Jordan (`"standard"`), of Dion (arXiv 2504.05295; others call them "quintic"), of
Polar Express (arXiv 2505.16932), of CANS (arXiv 2506.10935), of cubic iterations (arXiv
2606.00371), of Turbo-Muon (arXiv 2512.04632; for `preconditioning="aol"`) and of DeepSeek-V4.

Those of Polar Express are the optimal ones for exact arithmetic (`"polar_express_raw"`). In its
Algorithm 1, which Levanter and NVIDIA run, each iteration takes its matrix as if it were divided by
1.01: rounding makes singular values larger than 1, which the raw ones make grow.
"""


def checked_coefficients(ns_coeffs: Any, ns_steps: Any) -> Coefficients:
    """The coefficients of each iteration, from the arguments `ns_coeffs` and `ns_steps`.

    Raises:
        TypeError: `ns_steps` is no integer.
        ValueError: the coefficients are neither published ones, three numbers, nor a sequence of
            three numbers each.
    """
    allowed = (
        f"one of {', '.join(map(repr, PUBLISHED))}, three numbers for all iterations, or "
        "a sequence with three numbers for each iteration, the first two of them not near 0"
    )
    if ns_steps is not None:
        check_integer("ns_steps", ns_steps, at_least=1)
        if ns_steps > LARGEST:
            raise ValueError(f"ns_steps must be at most {LARGEST}, got {ns_steps}. 5 are usual.")
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in PUBLISHED:
            raise ValueError(f"ns_coeffs must be {allowed}; got {ns_coeffs!r}.")
        return PUBLISHED[ns_coeffs].of(ns_steps)
    if _is_triple(ns_coeffs):
        return Published((_triple(ns_coeffs),)).of(ns_steps)
    if isinstance(ns_coeffs, Sequence) and ns_coeffs and all(map(_is_triple, ns_coeffs)):
        number = len(ns_coeffs)
        if ns_steps not in (None, number):
            raise ValueError(
                f"ns_steps must be None or {number} where ns_coeffs has {number} iterations, "
                f"got {ns_steps}. Give the coefficients of each iteration."
            )
        return tuple(map(_triple, ns_coeffs))
    raise ValueError(
        f"ns_coeffs must be {allowed}; got {ns_coeffs!r}. They are Python numbers, known when the "
        "step is traced: with optax.inject_hyperparams name ns_coeffs in static_args."
    )


def _is_triple(node: Any) -> bool:
    return (
        isinstance(node, Sequence)
        and not isinstance(node, str)
        and len(node) == 3
        and all(isinstance(x, int | float | np.floating) and abs(x) <= LARGEST for x in node)
        and min(map(abs, node[:2])) >= 1 / LARGEST  # the iteration divides by both
    )


def _triple(node: Any) -> tuple[float, float, float]:
    a, b, c = map(float, node)
    return a, b, c
