"""The commands of `python -m optax_largebatch`."""

import json
import subprocess
import sys

import pytest

from optax_largebatch import recipes
from optax_largebatch.__main__ import main


def printed(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_lists_the_recipes(capsys):
    assert printed(capsys, "recipes").split() == recipes.names()
    assert json.loads(printed(capsys, "recipes", "--json")) == recipes.names()


def test_prints_a_recipe(capsys):
    name = "bert-large/lamb/mlperf"
    recipe = recipes.get(name, 10000)
    assert printed(capsys, "recipes", name, "--batch-size", "10000") == recipe.summary() + "\n"
    numbers = json.loads(printed(capsys, "recipes", name, "--batch-size", "10000", "--json"))
    assert numbers["learning_rate"] == recipe.learning_rate
    assert numbers["origin"] == recipe.origin


def test_goes_beyond_when_asked(capsys):
    command = ("recipes", "resnet50/lamb/you", "--batch-size", "65536")
    assert main(command) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("optax_largebatch recipes: batch_size must be within")
    assert "extrapolated" in printed(capsys, *command, "--extrapolate")


SCALE = ("scale", "--from-batch", "256", "--to-batch", "1024", "--learning-rate", "0.1")


def test_scales(capsys):
    command = (*SCALE, "--rule", "linear", "--total-steps", "1000")
    assert "learning_rate  0.1 -> 0.4" in printed(capsys, *command)
    scaled = json.loads(printed(capsys, *command, "--json"))
    assert scaled["learning_rate"] == pytest.approx(0.4)
    assert scaled["total_steps"] == 250
    assert scaled["b1"] is None


def test_says_what_is_wrong(capsys):
    assert main((*SCALE, "--rule", "adam_sde", "--b1", "0.5", "--b2", "0.9", "--eps", "0")) == 2
    assert "optax_largebatch scale: to_batch must be at most 512" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main((*SCALE, "--rule", "cubic"))
    assert "invalid choice: 'cubic'" in capsys.readouterr().err


def test_runs_as_a_module():
    command = [sys.executable, "-W", "error", "-m", "optax_largebatch", "recipes"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split() == recipes.names()
