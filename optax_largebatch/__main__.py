"""Published recipes in the terminal."""

import argparse
from collections.abc import Sequence
import dataclasses
import functools
import json
import os
import sys
import textwrap
from typing import Any

from optax_largebatch import __version__, recipes
from optax_largebatch.recipes.catalogue import find

PROGRAM = "optax-largebatch"
LONGEST_ERROR = 1000
"""The limit for the characters of an error, which may quote what was typed."""

Options = dict[str, tuple[type, str]]
"""The type of each option, and its help."""

RECIPE_OPTIONS: Options = {
    "batch_size": (int, "examples in a step"),
    "epochs": (int, "one of the published numbers, if there are several"),
    "examples": (int, "examples in an epoch"),
    "total_steps": (int, "steps of the run"),
    "warmup_steps": (int, "steps of the warm-up"),
    "learning_rate": (float, "peak of the schedule"),
    "bias_learning_rate": (float, "peak for biases and norms, if they have their own"),
    "weight_decay": (float, "for the parameters that are decayed"),
}
RAMP_OPTIONS: Options = {
    "total": (str, "of a ramp: tokens of the run, such as 1T"),
    "increment": (int, "of a linear ramp: what it adds to the batch size at once"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the words of the command line after the name; None for those of this process.

    Returns:
        The exit status: 0, or 2 if something does not exist or makes no sense.
    """
    options = vars(_parser().parse_args(arguments))
    command = options.pop("command")
    try:
        print(_recipes(**options), flush=True)
    except (ArithmeticError, OSError, TypeError, ValueError) as error:
        if isinstance(error, OSError):
            # What waits in the buffer would fail once more when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # a reader such as `head` has seen enough
            return 0
        overflow = "a number is too large or too small: " * isinstance(error, ArithmeticError)
        text = textwrap.shorten(f"{overflow}{error}", LONGEST_ERROR, placeholder=" ...")
        print(f"{PROGRAM} {command}: {text}", file=sys.stderr)
        return 2
    return 0


def _recipes(name: str | None = None, as_json: bool = False, **settings: Any) -> str:
    names = recipes.names(name)
    if len(names) > 1 and not settings:
        return json.dumps(names) if as_json else recipes.table(name)
    name = find(name or "")
    is_ramp = name in recipes.names("ramps")
    for option in settings.keys() - (RAMP_OPTIONS if is_ramp else RECIPE_OPTIONS):
        raise ValueError(f"--{option.replace('_', '-')} is no option of {name!r}.")
    if is_ramp:
        plan = recipes.ramp(name, **settings)
        return json.dumps(dataclasses.asdict(plan)) if as_json else str(plan)
    recipe = recipes.get(name, **settings)
    if as_json:
        return json.dumps(dataclasses.asdict(recipe) | {"code": recipe.code()})
    lines = [textwrap.fill(x, 80, subsequent_indent="    ") for x in recipe.summary().split("\n")]
    return "\n".join([*lines, "", recipe.code()])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="List the published recipes and ramps, or print one.",
        epilog=f"example:\n  {PROGRAM} recipes byol --batch-size 2048 --epochs 300",
        # A raw description keeps the example as it is written.
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, width=80),
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("--json", dest="as_json", action="store_true", help="for scripts")
    parser.add_argument("command", choices=("recipes",), help="what to do")
    parser.add_argument("name", nargs="?", help="a name, or a part of names, such as lars or ramps")
    for option, (kind, meaning) in (RECIPE_OPTIONS | RAMP_OPTIONS).items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=kind, help=meaning)
    return parser


if __name__ == "__main__":
    sys.exit(main())
