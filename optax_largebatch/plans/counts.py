"""Numbers of examples and tokens, as people write them: `"2M"` is two million."""

import operator
import re
from typing import Any

from optax_largebatch.arguments import check_integer

Count = int | str
"""An integer, or a string such as `"2M"`, `"1.5B"`, `"20k"`."""

UNITS = (("T", 12), ("B", 9), ("M", 6), ("k", 3))
_POWERS = {unit.lower(): power for unit, power in UNITS} | {"": 0}
_WRITTEN = re.compile(r"([0-9]{1,30})(?:\.([0-9]{1,30}))?\s*([kmbt]?)", re.IGNORECASE | re.ASCII)
LARGEST = 2**63 - 1
"""The largest count; a product of two still fits into a float of 32 bits."""


def count(name: str, value: Any, at_least: int = 0) -> int:
    """The integer that `value` means; exact, since no float is in between."""
    if isinstance(value, float) and value.is_integer():  # 1e9
        value = int(value)
    if isinstance(value, str):
        match = _WRITTEN.fullmatch(value.strip())
        whole, fraction, unit = match.groups(default="") if match else ("", "", "")
        zeros = _POWERS[unit.lower()] - len(fraction)
        if not match or zeros < 0:
            raise ValueError(
                f"{name} must be a whole number of at most {LARGEST}, such as 512, '512', '2M' or "
                f"'1.5B' (k, M, B and T are 10^3, 10^6, 10^9 and 10^12), got {value!r}."
            )
        value = int(whole + fraction) * 10**zeros
    number = integer(value)
    if number is None:
        raise TypeError(f"{name} must be a whole number, such as 512 or '2M', got {value!r}.")
    check_integer(name, number, at_least=at_least)
    if number > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, got {value!r}.")
    return number


def integer(value: Any) -> int | None:
    """The integer that a number, or an array of no dimensions that is not traced, is, if any."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def written(number: int) -> str:
    """The number in at most four digits and a unit: `2M`, `16.78M`, `512`."""
    if number < 10_000:
        return str(number)
    rounded = float(f"{number:.4g}")  # first, or 999,999 would be 1000k
    unit, power = next((u, p) for u, p in UNITS if rounded >= 10**p)
    return f"{rounded / 10**power:.4g}{unit}"
