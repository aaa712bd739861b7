"""Numbers of examples and tokens, as people write them: `"2M"` is two million."""

import re
from typing import Any

from optax_largebatch.arguments import check_integer

Count = int | str
"""An integer, or a string such as `"2M"`, `"1.5B"`, `"20k"`."""

_UNITS = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
_WRITTEN = re.compile(r"(\d+)(?:\.(\d+))?\s*([kmbgt]?)", re.IGNORECASE)


def count(name: str, value: Any, at_least: int = 0) -> int:
    """The integer that `value` means; exact, since no float is in between."""
    if isinstance(value, float) and value.is_integer():  # 1e9
        value = int(value)
    if isinstance(value, str):
        found = _WRITTEN.fullmatch(value.strip())
        whole, fraction, unit = found.groups(default="") if found else ("", "", "")
        zeros = _UNITS[unit.lower()] - len(fraction)
        if not found or zeros < 0:
            raise ValueError(
                f"{name} must be a whole number, such as 512, '512', '2M' or '1.5B' (k, M, B and T "
                f"are 10^3, 10^6, 10^9 and 10^12), got {value!r}."
            )
        value = int(whole + fraction) * 10**zeros
    check_integer(name, value, at_least=at_least)
    return int(value)


def written(number: int) -> str:
    """The number in at most four digits and a unit: `2M`, `16.78M`, `512`."""
    for unit, power in (("T", 12), ("B", 9), ("M", 6), ("k", 3)):
        if number >= 10 ** (power + (unit == "k")):
            return f"{number / 10**power:.4g}{unit}"
    return str(number)
