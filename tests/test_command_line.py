"""The commands of `python -m optax_largebatch`."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys

import pytest

import optax_largebatch as lb
from optax_largebatch import recipes
from optax_largebatch.__main__ import main


def printed(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_lists_the_recipes(capsys):
    assert printed(capsys, "recipes") == f"{recipes.table()}\n"
    assert printed(capsys, "recipes", "lars") == f"{recipes.table('lars')}\n"
    assert json.loads(printed(capsys, "recipes", "lars", "--json")) == recipes.names("lars")
    assert json.loads(printed(capsys, "recipes", "--json")) == recipes.names()


def test_prints_a_recipe(capsys):
    name = "bert-large/lamb/mlperf"
    recipe = recipes.get(name, 10000)
    said = printed(capsys, "recipes", name, "--batch-size", "10000")
    assert said == f"{recipe.summary()}\n\n{recipe.code()}\n"
    numbers = json.loads(printed(capsys, "recipes", name, "--batch-size", "10000", "--json"))
    assert numbers["learning_rate"] == recipe.learning_rate
    assert numbers["origin"] == recipe.origin


def test_prints_the_numbers_and_the_code_of_a_part_of_a_name(capsys):
    said = printed(capsys, "recipes", "byol", "--batch-size", "2048", "--epochs", "300")
    recipe = recipes.get("byol", 2048, epochs=300)
    assert said == f"{recipe.summary()}\n\n{recipe.code()}\n"
    assert "schedule = lb.warmup_cosine(peak_value=2.4, total_steps=187670" in said
    given = ("--total-steps", "9000", "--learning-rate", "0.5", "--weight-decay", "0")
    numbers = json.loads(printed(capsys, "recipes", "barlow-twins", *given, "--json"))
    assert (numbers["total_steps"], numbers["learning_rate"]) == (9000, 0.5)
    assert numbers["weight_decay"] == 0
    assert "optimizer = lb.lars(" in numbers["code"]


def test_says_its_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(("--version",))
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"optax_largebatch {lb.__version__}\n"


def test_plans_a_run(capsys):
    said = printed(capsys, "plan", "0:512 2M:2048", "--total", "20M")
    assert said == f"{lb.batch_plan('0:512 2M:2048', total='20M')}\n"
    options = "--total 20M --seesaw 4096 --learning-rate 1e-3 --warmup 500k --decay linear"
    options += " --weight-decay 0.1 --micro-batch-size 8 --devices 8"
    rate = lb.PlannedRate(1e-3, total="20M", warmup="500k", decay="linear")
    plan = lb.batch_plan(
        lb.seesaw(512, largest_batch=4096), total="20M",
        learning_rate=rate, weight_decay=0.1, micro_batch_size=8, devices=8,
    )  # fmt: skip
    said = printed(capsys, "plan", "512", *options.split())
    assert said == f"{plan}\n"
    assert max(map(len, said.splitlines())) <= 80
    said = printed(capsys, "plan", "512", *options.split(), "--json")
    assert lb.BatchPlan.from_json(said) == plan
    options = "--total 8B --sequence-length 1024 --learning-rate 1e-3 --end-value 1e-4"
    options += " --coupling linear --weight-decay 0.1 --decay-kind l2 --reference-batch-size 2048"
    plan = lb.batch_plan(
        "0:512 1B:2048", total="8B", sequence_length=1024, coupling="linear",
        learning_rate=lb.PlannedRate(1e-3, end_value=1e-4), weight_decay=0.1, decay_kind="l2",
        reference_batch_size=2048,
    )  # fmt: skip
    said = printed(capsys, "plan", "0:512 1B:2048", *options.split(), "--json")
    assert lb.BatchPlan.from_json(said) == plan
    assert printed(capsys, "plan", "512", "--total", "2M") == f"{lb.batch_plan(512, total='2M')}\n"
    for wrong in ("--warmup 10k", "--seesaw 4096"):
        assert main(("plan", "512", "--total", "20M", *wrong.split())) == 2
        assert "--learning-rate must be given" in capsys.readouterr().err
    assert main(("plan", "0:512", "--total", "20M", "--devices", "7")) == 2
    assert "devices = 1 x 7 = 7, got 512" in capsys.readouterr().err


def test_a_word_finds_a_ramp(capsys):
    assert printed(capsys, "recipes", "olmo") == f"{recipes.ramp('olmo-1b')}\n"
    said = printed(capsys, "recipes", "gpt-3", "--learning-rate", "0.1", "--total", "400B")
    assert said == f"{recipes.ramp('gpt-3/megatron', '400B', learning_rate=0.1)}\n"
    several = printed(capsys, "recipes", "deepseek").splitlines()
    assert [line.split()[0] for line in several] == ["ramp", "deepseek-v2", "deepseek-v3"]
    names = json.loads(printed(capsys, "recipes", "deepseek", "--json"))
    assert names == ["deepseek-v2", "deepseek-v3"]
    assert main(("recipes", "deepseek", "--increment", "3072")) == 2
    error = capsys.readouterr().err
    assert "'deepseek' is a word of deepseek-v2, deepseek-v3." in error


def test_a_word_of_recipes_and_ramps(capsys):
    said = printed(capsys, "recipes", "nanochat")
    assert said.startswith(f"{recipes.table('nanochat')}\n\nramp ")
    assert "\nnanochat-d34 " in said
    names = json.loads(printed(capsys, "recipes", "nanochat", "--json"))
    assert names == [*recipes.names("nanochat"), "nanochat-d34"]
    said = printed(capsys, "recipes", "nanochat", "--total", "50B")
    assert said == f"{recipes.ramp('nanochat-d34', '50B')}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("olmo-1b --batch-size 3", "--batch-size does not go with a ramp such as 'olmo-1b', which "
         "takes --total, --increment, --learning-rate, --weight-decay."),
        ("olmo --extrapolate", "--extrapolate does not go with a ramp such as 'olmo-1b'"),
        ("byol --total 1T", "--total goes with a ramp alone; `recipes ramps` lists the ramps."),
        ("--increment 8", "--increment goes with a ramp alone"),
    ],
)  # fmt: skip
def test_says_which_flags_go_with_ramps(capsys, words, said):
    assert main(("recipes", *words.split())) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith(f"optax_largebatch recipes: {said}")


def test_says_what_a_recipe_still_needs(capsys):
    assert main(("recipes", "byol")) == 2
    assert "recipes: epochs must be given for 'resnet50/lars/byol'" in capsys.readouterr().err
    assert main(("recipes", "lars", "--batch-size", "512")) == 2
    assert "It is a part of" in capsys.readouterr().err
    assert main(("recipes", "adam")) == 2
    assert "part must be a field (language" in capsys.readouterr().err


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
    said = printed(capsys, *command)
    assert "learning_rate  0.1 -> 0.4" in said
    scaled = json.loads(printed(capsys, *command, "--json"))
    assert scaled["learning_rate"] == pytest.approx(0.4)
    assert scaled["total_steps"] == 250
    assert scaled["b1"] is None
    assert f"{scaled['account']}\n" == said


OPTIONS = {
    "decay_kind": "decoupled",
    "run_length": 2.0,
    "length_power": -0.395,
    "b2_floor": 0.99,
    "b2_ceiling": 0.995,
    "noise_scale": 512.0,
}


def test_scales_with_all_that_the_function_takes(capsys):
    settings = {
        "learning_rate": 0.1, "weight_decay": 0.1, "momentum": 0.95, "b1": 0.9, "b2": 0.992,
        "eps": 1e-12, "warmup_steps": 10, "total_steps": 1000,
    }  # fmt: skip
    asked = inspect.signature(lb.scale_hyperparameters).parameters
    given = {"from_batch", "to_batch", "rule"}
    by_keyword = {name for name, one in asked.items() if one.kind is one.KEYWORD_ONLY}
    assert set(OPTIONS) == by_keyword - given
    scaled = lb.scale_hyperparameters(
        lb.Hyperparameters(**settings), from_batch=256, to_batch=1024, rule="hyperball", **OPTIONS
    )
    flags = [
        word
        for name, value in (settings | OPTIONS).items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = (*SCALE[:5], "--rule", "hyperball", *flags)
    assert printed(capsys, *command) == f"{scaled}\n"
    numbers = json.loads(printed(capsys, *command, "--json"))
    assert numbers == dataclasses.asdict(scaled.settings) | {"account": str(scaled)}


def test_says_what_is_wrong(capsys):
    lengths = ("--warmup-steps", "500", "--total-steps", "1500")
    assert main((*SCALE, "--rule", "legew", *lengths)) == 2
    assert "optax_largebatch scale: to_batch must be at most 767" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main((*SCALE, "--rule", "cubic"))
    assert "invalid choice: 'cubic'" in capsys.readouterr().err


HUGE = "9" * 400


@pytest.mark.parametrize(
    "command",
    [
        (*SCALE[:3], "--to-batch", HUGE, *SCALE[5:], "--rule", "linear"),
        ("scale", "--from-batch", HUGE, "--to-batch", "1", *SCALE[5:], "--rule", "sqrt",
         "--total-steps", "5"),
        ("recipes", "resnet50/sgd/linear", "--batch-size", "256", "--total-steps", HUGE),
    ],
    ids=["large", "small", "recipe"],
)  # fmt: skip
def test_numbers_beyond_floats_are_one_line(capsys, command):
    assert main(command) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert f"optax_largebatch {command[0]}: a number is too large or too small" in error
    assert error.count("\n") == 1


def test_runs_as_a_module():
    command = [sys.executable, "-W", "error", "-m", "optax_largebatch", "recipes"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout == f"{recipes.table()}\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [("重み", rb"'\u91cd\u307f'"), ("red\x1b[31m\nline", rb"\x1b[31m"), ("x" * 10**4, b" ...\n")],
    ids=["unicode", "escape", "long"],
)
def test_an_error_does_not_write_on_the_terminal(name, said):
    command = [sys.executable, "-m", "optax_largebatch", "recipes", name]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, capture_output=True, timeout=120, env=ascii_only)
    assert (run.returncode, run.stdout) == (2, b"")
    assert said in run.stderr
    assert run.stderr.count(b"\n") == 1
    assert len(run.stderr) < 1100


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_output_that_nobody_takes():
    """A reader that has seen enough, such as `head`, is no error; a full disk is one."""
    command = [sys.executable, "-m", "optax_largebatch", "recipes", "byol", "--epochs", "300"]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        run = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=120)
    assert (run.returncode, run.stderr) == (0, b"")
    with open("/dev/full", "wb") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert run.returncode == 2
    assert run.stderr == b"optax_largebatch recipes: [Errno 28] No space left on device\n"
