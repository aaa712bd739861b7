"""Published recipes and plans of the batch size, in the terminal."""

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
from optax_largebatch.plans.batch_plan import batch_plan
from optax_largebatch.plans.growth import seesaw
from optax_largebatch.plans.law import DECAY_KINDS, LAWS
from optax_largebatch.plans.planned_rate import PlannedRate
from optax_largebatch.plans.tuned_run import FAMILIES, FROM_ADAMW, TunedRun
from optax_largebatch.recipes.catalogue import find
from optax_largebatch.schedules.warmup import SHAPES

PROGRAM = "optax-largebatch"
LONGEST_ERROR = 1000
"""The limit for the characters of an error, which may quote what was typed."""

Options = dict[str, tuple[Any, str]]
"""The type or the choices of each option, and its help."""

PUBLISHED = [name for name in LAWS if name not in FAMILIES]

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
PLAN_OPTIONS: Options = {
    "sequence_length": (int, "tokens in an example; all lengths are then in tokens"),
    "micro_batch_size": (int, "examples of a micro-batch on each device"),
    "devices": (int, "devices that share a batch; the default is 1"),
    "seesaw": (str, "doubles the batch size where the rate halves, up to this one"),
    "law": (str, f"how the numbers move; one of an optimizer, or {', '.join(PUBLISHED)}"),
    "to": (FROM_ADAMW, f"the optimizer to plan for, from adamw: {', '.join(FROM_ADAMW)}"),
}
RUN_OPTIONS: Options = {
    "optimizer": (
        tuple(FAMILIES),
        f"of the run that was tuned, {', '.join(FAMILIES)}; the next options are its numbers",
    ),
    "tuned_batch_size": (str, "the batch size that the numbers are for"),
    "tuned_total": (str, "its examples; the default is --total"),
    "learning_rate": (float, "peak"),
    "warmup": (str, "examples of its warm-up, such as 200k"),
    "hold": (str, "examples at the peak after it"),
    "decay": (tuple(SHAPES), f"of the rate from then on, {', '.join(SHAPES)}; cosine if not given"),
    "end_value": (float, "learning rate at the end; the default is 0"),
    "weight_decay": (float, "0 is the default"),
    "decay_kind": (DECAY_KINDS, "decoupled (AdamW), independent, l2 (SGD) or rescaled (LAMB)"),
    "momentum": (float, "of Muon, MuonH, LARS and SGD"),
    "b1": (float, "of Adam, AdamH, LAMB and LANS"),
    "b2": (float, "likewise"),
    "eps": (float, "likewise"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the words of the command line after the name; None for those of this process.

    Returns:
        The exit status: 0, or 2 if something does not exist or makes no sense.
    """
    options = vars(_parser().parse_args(arguments))
    command = options.pop("command")
    run = options.pop("run")
    try:
        print(run(**options), flush=True)
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


def _recipes(
    name: str | None = None,
    as_json: bool = False,
    **settings: Any,
) -> str:
    names = recipes.names(name)
    if len(names) > 1 and not settings:
        return json.dumps(names) if as_json else recipes.table(name)
    entry = find(name or "")
    is_ramp = entry["field"] == "ramps"
    allowed = RAMP_OPTIONS if is_ramp else RECIPE_OPTIONS
    for option in sorted(settings.keys() - allowed):
        raise ValueError(f"--{option.replace('_', '-')} is no option of {entry['name']!r}.")
    if is_ramp:
        plan = recipes.ramp(entry["name"], **settings)
        return plan.to_json() if as_json else str(plan)
    recipe = recipes.get(entry["name"], **settings)
    if as_json:
        return json.dumps(dataclasses.asdict(recipe) | {"code": recipe.code()})
    lines = [textwrap.fill(x, 80, subsequent_indent="    ") for x in recipe.summary().split("\n")]
    return "\n".join([*lines, "", recipe.code()])


def _plan(stages: str, as_json: bool = False, **settings: Any) -> str:
    largest = settings.pop("seesaw", None)
    to = settings.pop("to", None)
    numbers = {key: settings.pop(key) for key in RUN_OPTIONS if key in settings}
    if numbers or to:
        run = _run(numbers, settings["total"])
        length = settings.get("sequence_length", 1)
        settings["run"] = run if to is None else run.to(to, sequence_length=length)
    growth = stages if largest is None else seesaw(stages, largest_batch=largest)
    plan = batch_plan(growth, **settings)
    return plan.to_json() if as_json else str(plan)


def _run(numbers: dict[str, Any], total: str) -> TunedRun:
    for option in ("optimizer", "tuned_batch_size", "learning_rate"):
        if option not in numbers:
            raise ValueError(
                f"--{option.replace('_', '-')} must be given for a plan of the learning rate: a "
                "run that was tuned has an optimizer, a batch size and a rate."
            )
    names = ("warmup", "hold", "decay", "end_value")
    shape = {name: numbers.pop(name) for name in names if name in numbers}
    return TunedRun(
        numbers.pop("optimizer"),
        batch_size=numbers.pop("tuned_batch_size"),
        total=numbers.pop("tuned_total", total),
        learning_rate=PlannedRate(numbers.pop("learning_rate"), **shape),
        **numbers,
    )


def _parser() -> argparse.ArgumentParser:
    # A raw description keeps the examples as they are written.
    formatter = functools.partial(argparse.RawDescriptionHelpFormatter, width=80)
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str,
        run: Any,
        options: Options,
        text: str,
        example: str,
    ) -> Any:
        added = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example:\n  {PROGRAM} {name} {example}",
            formatter_class=formatter, argument_default=argparse.SUPPRESS,
        )  # fmt: skip
        added.set_defaults(run=run)
        added.add_argument("--json", dest="as_json", action="store_true", help="for scripts")
        for option, (kind, meaning) in options.items():
            allowed = {"type": kind}
            if isinstance(kind, tuple):
                allowed = {"choices": kind, "metavar": option.upper()}
            added.add_argument(f"--{option.replace('_', '-')}", help=meaning, **allowed)
        return added

    added = command(
        "recipes", _recipes, RECIPE_OPTIONS | RAMP_OPTIONS,
        "list the published recipes and ramps, or print one",
        "byol --batch-size 2048 --epochs 300",
    )  # fmt: skip
    added.add_argument("name", nargs="?", help="a name, or a part of names, such as lars or ramps")
    added = command(
        "plan", _plan, PLAN_OPTIONS | RUN_OPTIONS, "plan the batch size over a run",
        "16384 --total 77M --to muonh \\\n    --optimizer adamw --tuned-batch-size 512 "
        "--tuned-total 51M \\\n    --learning-rate 3e-4 --warmup 1M --weight-decay 0.05",
    )  # fmt: skip
    added.add_argument("stages", help="where each batch size begins, or one batch size")
    added.add_argument("--total", required=True, help="examples of the run, such as 20M")
    return parser


if __name__ == "__main__":
    sys.exit(main())
