"""The commands `optax-largebatch recipes` and `optax-largebatch plan`."""

import argparse
import dataclasses
from importlib import metadata
import json
import os
from pathlib import Path
import shlex
import subprocess
import sys
import tomllib

import pytest

import optax_largebatch as lb
from optax_largebatch import recipes
from optax_largebatch.__main__ import PROGRAM, _parser, main

MODULE = [sys.executable, "-W", "error", "-m", "optax_largebatch"]
COMMANDS = next(
    action.choices
    for action in _parser()._actions
    if isinstance(action, argparse._SubParsersAction)
)


@pytest.fixture
def printed(capsys):
    """Runs a command, and returns what it prints."""

    def run(words):
        assert main(shlex.split(words)) == 0
        return capsys.readouterr().out.removesuffix("\n")

    return run


@pytest.fixture
def refused(capsys):
    """Runs a command that prints one line of error and nothing else, and returns it."""

    def run(words):
        assert main(shlex.split(words)) == 2
        output, error = capsys.readouterr()
        assert output == ""
        assert error.startswith(f"{PROGRAM} {words.split()[0]}: ")
        assert error.count("\n") == 1
        return error

    return run


@pytest.mark.parametrize("part", [None, "lars", "ramps"])
def test_lists_names(printed, part):
    words = f"recipes {part or ''}"
    assert printed(words) == recipes.table(part)
    assert json.loads(printed(f"{words} --json")) == recipes.names(part)


@pytest.mark.parametrize(
    ("words", "name", "given"),
    [
        ("bert-large/lamb/mlperf --batch-size 12288", "bert-large/lamb/mlperf",
         {"batch_size": 12288}),
        ("byol --batch-size 2048 --epochs 300", "byol", {"batch_size": 2048, "epochs": 300}),
        (
            "barlow-twins --bias-learning-rate 0.1 --warmup-steps 7 --examples 50000 "
            "--total-steps 9000 --learning-rate 0.5 --weight-decay 0",
            "barlow-twins",
            {"bias_learning_rate": 0.1, "warmup_steps": 7, "examples": 50000, "total_steps": 9000,
             "learning_rate": 0.5, "weight_decay": 0.0},
        ),
    ],
)  # fmt: skip
def test_prints_a_recipe(printed, words, name, given):
    recipe = recipes.get(name, **given)
    said, code = printed(f"recipes {words}").split("\n\n", 1)
    assert (said.split(), code) == (recipe.summary().split(), recipe.code())
    assert max(map(len, said.splitlines())) <= 80
    said = json.loads(printed(f"recipes {words} --json"))
    assert said == json.loads(json.dumps(dataclasses.asdict(recipe) | {"code": recipe.code()}))


@pytest.mark.parametrize(
    ("words", "name", "given"),
    [
        ("gpt-3 --total 400B", "gpt-3/megatron", {"total": "400B"}),
        ("glm-4.5 --total 1T --increment 4096", "glm-4.5", {"total": "1T", "increment": 4096}),
    ],
)  # fmt: skip
def test_prints_the_plan_of_a_ramp(printed, words, name, given):
    plan = recipes.ramp(name, **given)
    assert printed(f"recipes {words}") == str(plan)
    assert lb.BatchPlan.from_json(printed(f"recipes {words} --json")) == plan


RATE = lb.PlannedRate(1e-3, warmup="500k", hold="15M", decay="sqrt", end_value=1e-4)
ADAMW = lb.TunedRun(
    "adamw", batch_size=512, total="20M", learning_rate=RATE, weight_decay=0.1, b1=0.95
)
SGD = lb.TunedRun(
    "sgd", batch_size=2048, total="4B", learning_rate=lb.PlannedRate(1e-3), weight_decay=0.1,
    decay_kind="decoupled",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "plan"),
    [
        ("512 --total 2M", lb.batch_plan(512, total="2M")),
        ("'0:512 2M:2048' --total 20M", lb.batch_plan("0:512 2M:2048", total="20M")),
        (
            "512 --total 20M --seesaw 4096 --optimizer adamw --tuned-batch-size 512 --to muonh "
            "--learning-rate 1e-3 --warmup 500k --hold 15M --decay sqrt --end-value 1e-4 "
            "--b1 0.95 --weight-decay 0.1 --micro-batch-size 8 --devices 8",
            lb.batch_plan(
                lb.seesaw(512, largest_batch=4096), total="20M", run=ADAMW.to("muonh"),
                micro_batch_size=8, devices=8,
            ),
        ),
        (
            "'0:512 1B:2048' --total 8B --sequence-length 1024 --learning-rate 1e-3 --law sqrt "
            "--weight-decay 0.1 --decay-kind decoupled --tuned-batch-size 2048 --tuned-total 4B "
            "--optimizer sgd",
            lb.batch_plan("0:512 1B:2048", total="8B", sequence_length=1024, run=SGD, law="sqrt"),
        ),
    ],
)  # fmt: skip
def test_plans_a_run(printed, words, plan):
    said = printed(f"plan {words}")
    assert said == str(plan)
    assert max(map(len, said.splitlines())) <= 80
    assert lb.BatchPlan.from_json(printed(f"plan {words} --json")) == plan


def test_tokens_are_not_examples_when_a_decay_settles(printed):
    words = "plan 8 --total 1M --sequence-length 1024 --to muonh --optimizer adamw "
    words += "--tuned-batch-size 8 --learning-rate 0.001 --weight-decay 0.1"
    assert "Do not trust it" in printed(words)


HUGE = "9" * 400


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("recipes olmo-1b --learning-rate 1", "--learning-rate is no option of 'olmo-1b'"),
        ("recipes byol --total 1T", "--total is no option of 'resnet50/lars/byol'"),
        ("recipes --increment 8", "name must be that of a recipe"),
        (f"recipes resnet50/sgd/linear --batch-size 256 --total-steps {HUGE}",
         "a number is too large or too small"),
        ("plan 512 --total 20M --warmup 10k", "--optimizer must be given"),
        ("plan 512 --total 20M --seesaw 4096", "must be a schedule"),
    ],
)  # fmt: skip
def test_says_what_is_wrong(refused, words, said):
    assert said in refused(words)


def test_says_its_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"{PROGRAM} {lb.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("terminal", ["40", "200"])
def test_help_has_all_options_and_an_example_that_runs(command, terminal, printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", terminal)
    assert all(action.help for action in COMMANDS[command]._actions)
    text = COMMANDS[command].format_help()
    assert max(map(len, text.splitlines())) <= 80
    example = text.partition("example:\n")[2].replace("\\\n", " ")
    program, words = example.split(maxsplit=1)
    assert program == PROGRAM
    assert printed(words)


def test_is_a_console_script():
    project = tomllib.loads((Path(lb.__file__).parents[1] / "pyproject.toml").read_text())
    value = project["project"]["scripts"][PROGRAM]
    assert metadata.EntryPoint(PROGRAM, value, "console_scripts").load() is main


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("重み", rb"'\u91cd\u307f'"),
        pytest.param("red\x1b[31m\nline", rb"\x1b[31m", marks=pytest.mark.slow),
        pytest.param("x" * 10**4, b" ...\n", marks=pytest.mark.slow),
    ],
    ids=["unicode", "escape", "long"],
)
def test_an_error_does_not_write_on_the_terminal(name, said):
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run(
        [*MODULE, "recipes", name], capture_output=True, timeout=120, env=ascii_only
    )
    assert (run.returncode, run.stdout) == (2, b"")
    assert said in run.stderr
    assert run.stderr.count(b"\n") == 1
    assert len(run.stderr) < 1100


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_output_that_nobody_takes():
    """A reader that has seen enough, such as `head`, is no error; a full disk is one."""

    def into(file):
        command = [*MODULE, "recipes", "byol", "--epochs", "300"]
        run = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, timeout=120)
        return run.returncode, run.stderr

    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        assert into(closed) == (0, b"")
    with open("/dev/full", "wb") as full:
        status, error = into(full)
    assert status == 2
    assert error == b"optax-largebatch recipes: [Errno 28] No space left on device\n"
