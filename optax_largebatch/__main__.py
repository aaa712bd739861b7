"""Published recipes, another batch size, and plans of a run, in the terminal."""

import argparse
from collections.abc import Sequence
import dataclasses
import json
import os
import sys
from typing import Any

from optax_largebatch import __version__, recipes
from optax_largebatch.arguments import check_number
from optax_largebatch.diagnostics.explain import printable
from optax_largebatch.plans.batch_plan import batch_plan
from optax_largebatch.plans.coupling import DECAY_KINDS, POWERS
from optax_largebatch.plans.growth import seesaw
from optax_largebatch.plans.planned_rate import PlannedRate
from optax_largebatch.recipes.hyperparameters import Hyperparameters
from optax_largebatch.recipes.scaling import scale_hyperparameters
from optax_largebatch.recipes.scaling_rules import RULES
from optax_largebatch.schedules.warmup import SHAPES

LONGEST_ERROR = 1000
"""The limit for the characters of an error, which may quote what was typed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the words of the command line after the name; None for those of this process.

    Returns:
        The exit status: 0, or 2 if something that was asked for does not exist or makes no sense.
    """
    options = _parser().parse_args(arguments)
    try:
        text = options.run(options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        return _failed(options.command, str(error))
    except ArithmeticError as error:
        return _failed(options.command, f"a number is too large or too small: {error}")
    try:
        print(text, flush=True)
    except OSError as error:
        # What waits in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # a reader such as `head` has seen enough
            return _failed(options.command, str(error))
    return 0


def _failed(command: str, error: str) -> int:
    """Prints an error as one line; the exit status."""
    said = printable(" ".join(error.split()))
    said = said if len(said) <= LONGEST_ERROR else f"{said[:LONGEST_ERROR]} ..."
    print(f"optax_largebatch {command}: {said}", file=sys.stderr)
    return 2


def _recipes(options: argparse.Namespace) -> str:
    given = {
        name: value
        for name, value in vars(options).items()
        if name in _OF_RECIPES and value is not None
    }
    if options.name in ("ramp", "ramps"):
        return json.dumps(recipes.ramps().names) if options.json else str(recipes.ramps())
    having = _ramps_having(options.name)
    of_ramps = [_flag(name) for name in _OF_RAMPS_ALONE if name in given]
    if having and (options.name in having or of_ramps or not _is_of_recipes(options.name)):
        return _ramp(options, having, given)
    chosen = recipes.names(options.name)
    if of_ramps:
        raise ValueError(f"{of_ramps[0]} goes with a ramp alone; `recipes ramps` lists the ramps.")
    meant = [name for name in chosen if options.name in (name, *name.split("/"))]
    if options.name is None or (len(meant) != 1 and not given):
        if options.json:
            return json.dumps(chosen + having)
        ramps = f"\n\n{_listed(having)}" if having else ""
        return f"{recipes.table(options.name)}{ramps}"
    recipe = recipes.get(options.name, **given)
    if options.json:
        return json.dumps(dataclasses.asdict(recipe) | {"code": recipe.code()})
    return f"{recipe.summary()}\n\n{recipe.code()}"


def _ramp(options: argparse.Namespace, having: list[str], given: dict[str, Any]) -> str:
    """The plan of a ramp, or a list of those that have the word."""
    if len(having) > 1 and not given:
        return json.dumps(having) if options.json else str(_listed(having))
    if len(having) > 1:
        raise ValueError(
            f"name must be that of one ramp; {options.name!r} is a word of {', '.join(having)}."
        )
    wrong = [_flag(name) for name in given if name not in _OF_RAMPS]
    if wrong:
        raise ValueError(
            f"{wrong[0]} does not go with a ramp such as {having[0]!r}, which takes "
            f"{', '.join(map(_flag, _OF_RAMPS))}."
        )
    plan = recipes.ramp(having[0], **given)
    return plan.to_json() if options.json else str(plan)


def _ramps_having(word: str | None) -> list[str]:
    """The ramp of this name, or those that have this word in their names."""
    names = recipes.ramps().names
    if word in names:
        return [name for name in names if name == word]
    return [
        name for name in names if word in (*name.split("/"), *name.replace("/", "-").split("-"))
    ]


def _listed(ramps: list[str]) -> recipes.Ramps:
    return recipes.Ramps(tuple(line for line in recipes.ramps().lines if line.name in ramps))


def _is_of_recipes(word: str) -> bool:
    """Whether the word is part of a recipe's name, or a field."""
    try:
        return bool(recipes.names(word))
    except ValueError:
        return False


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _scale(options: argparse.Namespace) -> str:
    settings = Hyperparameters(
        **{name: getattr(options, name) for name, _ in _settings_and_types()}
    )
    given = {name: getattr(options, name) for name in _OF_SCALING}
    scaled = scale_hyperparameters(
        settings,
        from_batch=options.from_batch,
        to_batch=options.to_batch,
        rule=options.rule,
        decay_kind=options.decay_kind,
        **{name: value for name, value in given.items() if value is not None},
    )
    if options.json:
        return json.dumps(dataclasses.asdict(scaled.settings) | {"account": scaled.account})
    return scaled.account


def _plan(options: argparse.Namespace) -> str:
    shape = {"warmup": options.warmup, "decay": options.decay, "end_value": options.end_value}
    shape = {name: value for name, value in shape.items() if value is not None}
    if options.learning_rate is not None:
        check_number("--learning-rate", options.learning_rate, "(0, inf)")
        rate = PlannedRate(options.learning_rate, **shape)
    elif shape or options.seesaw is not None:
        raise ValueError(
            "--learning-rate must be given with --seesaw, --warmup, --decay and --end-value."
        )
    else:
        rate = None
    stages = options.stages
    if options.seesaw is not None:
        stages = seesaw(stages, largest_batch=options.seesaw)
    given = {name: getattr(options, name) for name in _OF_PLANS}
    plan = batch_plan(stages, total=options.total, learning_rate=rate, **given)
    return plan.to_json() if options.json else str(plan)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m optax_largebatch", description=__doc__)
    parser.add_argument("--version", action="version", version=f"optax_largebatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    found = commands.add_parser("recipes", help="lists the published recipes, or prints one")
    found.add_argument(
        "name", nargs="?",
        help="a recipe, or a word of its name that no other has; a word of several, such as lars, "
        "lists them; ramps lists those of the batch size, and a ramp, or a word that only it has, "
        "prints its plan; without it, all recipes",
    )  # fmt: skip
    for name, (kind, text) in _OF_RECIPES.items():
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            found.add_argument(flag, action="store_true", default=None, help=text)
        else:
            found.add_argument(flag, type=kind, help=text)
    found.set_defaults(run=_recipes)

    scaled = commands.add_parser("scale", help="scales settings to another batch size by a rule")
    scaled.add_argument("--from-batch", type=int, required=True)
    scaled.add_argument("--to-batch", type=int, required=True)
    scaled.add_argument("--rule", choices=RULES, required=True)
    for name, kind in _settings_and_types():
        flag = f"--{name.replace('_', '-')}"
        scaled.add_argument(flag, type=kind, required=name == "learning_rate")
    scaled.add_argument(
        "--decay-kind", choices=DECAY_KINDS,
        help="decoupled in AdamW and Muon, independent if no rate multiplies it, l2 if it is added "
        "to the gradient, rescaled in LAMB, LARS and the hyperball; without it, what the rule is "
        "most used with",
    )  # fmt: skip
    for name, text in _OF_SCALING.items():
        scaled.add_argument(f"--{name.replace('_', '-')}", type=float, help=text)
    scaled.set_defaults(run=_scale)

    planned = commands.add_parser("plan", help="plans the batch size over a run")
    planned.add_argument(
        "stages", help="where each batch size begins, as in '0:512 2M:2048'; or one batch size"
    )
    planned.add_argument("--total", required=True, help="the examples of the run, as in 20M")
    for name, (kind, text) in _OF_PLANS.items():
        allowed = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        default = kind[0] if isinstance(kind, tuple) else 1 if name == "devices" else None
        planned.add_argument(f"--{name.replace('_', '-')}", **allowed, default=default, help=text)
    planned.add_argument("--learning-rate", type=float, help="peak, for the reference batch size")
    planned.add_argument("--warmup", help="examples of its warm-up from 0, as in 200k")
    planned.add_argument("--decay", choices=SHAPES, help="its shape after the warm-up; cosine")
    planned.add_argument("--end-value", type=float, help="its value at the end; 0")
    planned.add_argument(
        "--seesaw", metavar="LARGEST",
        help="doubles the one batch size where the rate halves, up to this one",
    )  # fmt: skip
    planned.set_defaults(run=_plan)

    for command in (found, scaled, planned):
        command.add_argument("--json", action="store_true", help="for scripts")
    return parser


_OF_RECIPES: dict[str, tuple[type, str]] = {
    "batch_size": (int, "examples in a step"),
    "epochs": (int, "one of the published numbers, where there are several"),
    "examples": (int, "examples in an epoch"),
    "total_steps": (int, "steps of the run"),
    "warmup_steps": (int, "steps of the warm-up"),
    "learning_rate": (float, "peak of the schedule"),
    "bias_learning_rate": (float, "peak for biases and norms, where they have their own"),
    "weight_decay": (float, "for the parameters that are decayed"),
    "extrapolate": (bool, "go beyond the published batch sizes where the source states no rule"),
    "total": (str, "tokens of the run, such as 1T, for a ramp"),
    "increment": (int, "what a linear ramp adds to the batch size at once"),
}
"""What `recipes.get` and, of a ramp, `recipes.ramp` take besides the name."""

_OF_RAMPS_ALONE = ("total", "increment")
_OF_RAMPS = (*_OF_RAMPS_ALONE, "learning_rate", "weight_decay")


_OF_PLANS: dict[str, tuple[Any, str]] = {
    "sequence_length": (int, "tokens in an example; all numbers of examples are then of tokens"),
    "coupling": (tuple(POWERS), "how the learning rate follows the batch size"),
    "weight_decay": (float, "for the reference batch size"),
    "decay_kind": (DECAY_KINDS, "decoupled follows the batch size too; LAMB, LARS: rescaled"),
    "reference_batch_size": (str, "what rate and decay are for; the first batch size"),
    "micro_batch_size": (int, "examples of a micro-batch on each device"),
    "devices": (int, "devices that share a batch"),
}
"""What `batch_plan` takes as it is written in the terminal."""


_OF_SCALING = {
    "run_length": "examples of the new run over those of the old one; 1",
    "length_power": "the power of the run length in the rate; -0.32 for hyperball, otherwise 0",
    "b2_floor": "the smallest b2 that a rule makes; 0.95",
    "b2_ceiling": "the largest b2 that a rule makes; 0.9999",
    "noise_scale": "the batch size up to which noise dominates the gradient",
}
"""Numbers that `scale_hyperparameters` takes besides settings and batch sizes."""


def _settings_and_types() -> list[tuple[str, type]]:
    names = [field.name for field in dataclasses.fields(Hyperparameters)]
    return [(name, int if name.endswith("_steps") else float) for name in names]


if __name__ == "__main__":
    sys.exit(main())
