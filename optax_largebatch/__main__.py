"""Recipes and scaling rules in the terminal: `python -m optax_largebatch --help`."""

import argparse
from collections.abc import Sequence
import dataclasses
import json
import sys

from optax_largebatch import recipes
from optax_largebatch.recipes.scaling import RULES, Hyperparameters, scale_hyperparameters


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the words of the command line after the name; None for those of this process.

    Returns:
        The exit status: 0, or 2 where what was asked for does not exist.
    """
    options = _parser().parse_args(arguments)
    try:
        print(options.run(options))
    except (TypeError, ValueError) as error:
        print(f"optax_largebatch {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _recipes(options: argparse.Namespace) -> str:
    if options.name is None:
        return json.dumps(recipes.names()) if options.json else "\n".join(recipes.names())
    recipe = recipes.get(options.name, options.batch_size, extrapolate=options.extrapolate)
    return json.dumps(dataclasses.asdict(recipe)) if options.json else recipe.summary()


def _scale(options: argparse.Namespace) -> str:
    settings = Hyperparameters(
        **{name: getattr(options, name) for name, _ in _settings_and_types()}
    )
    scaled = scale_hyperparameters(settings, options.from_batch, options.to_batch, options.rule)
    return json.dumps(dataclasses.asdict(scaled.settings)) if options.json else scaled.account


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m optax_largebatch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    found = commands.add_parser("recipes", help="lists the published recipes, or prints one")
    found.add_argument("name", nargs="?", help="a recipe; without it, all names")
    found.add_argument("--batch-size", type=int, help="examples in a step")
    found.add_argument(
        "--extrapolate", action="store_true", help="go beyond the published batch sizes"
    )
    found.set_defaults(run=_recipes)

    scaled = commands.add_parser("scale", help="takes settings to another batch size by a rule")
    scaled.add_argument("--from-batch", type=int, required=True)
    scaled.add_argument("--to-batch", type=int, required=True)
    scaled.add_argument("--rule", choices=RULES, required=True)
    for name, kind in _settings_and_types():
        flag = f"--{name.replace('_', '-')}"
        scaled.add_argument(flag, type=kind, required=name == "learning_rate")
    scaled.set_defaults(run=_scale)

    for command in (found, scaled):
        command.add_argument("--json", action="store_true", help="for scripts")
    return parser


def _settings_and_types() -> list[tuple[str, type]]:
    names = [field.name for field in dataclasses.fields(Hyperparameters)]
    return [(name, int if name.endswith("_steps") else float) for name in names]


if __name__ == "__main__":
    sys.exit(main())
