"""The trip of one gradient, as engine/README.md describes it, and what it costs to trace."""

from pathlib import Path
import re
import sys
import traceback

import jax
import jax.numpy as jnp
import pytest

import optax_largebatch as lb
from optax_largebatch import norms
from tests.size import tokens_of

PACKAGE = Path(lb.__file__).parent
ENGINE = PACKAGE / "engine"


def files(frames):
    """The files of the package in a traceback, each stay in one of them once."""
    names = [
        Path(frame.filename).relative_to(PACKAGE).as_posix()
        for frame in frames
        if Path(frame.filename).is_relative_to(PACKAGE)
    ]
    return [name for name, last in zip(names, [None, *names], strict=False) if name != last]


def files_of_readme():
    """The files that the README lists."""
    names = re.findall(r"^\| \d \| `([\w./]+)` \|.*\|$", (ENGINE / "README.md").read_text(), re.M)
    return [(ENGINE / name).resolve().relative_to(PACKAGE).as_posix() for name in names]


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_trip_of_a_gradient(monkeypatch, platform):
    stacks = []

    def noting(function):
        def noted(*args, **kwargs):
            stacks.append(files(traceback.extract_stack()))
            return function(*args, **kwargs)

        return noted

    params = {"kernel": jnp.ones((100, 100))}
    optimizer = lb.lamb(1e-3)
    traced = jax.jit(optimizer.update).trace(params, optimizer.init(params), params)
    monkeypatch.setattr(norms, "block_sum", noting(norms.block_sum))
    monkeypatch.setattr(jax.lax, "reduce", noting(jax.lax.reduce))
    traced.lower(lowering_platforms=(platform,))
    # The first run reads the programs. The step is lowered after it is traced, so that its way
    # begins anew at `compilation.py`.
    taken = next(x for x in stacks if "engine/executor.py" in x)
    listed, way = files_of_readme(), ["engine/to_optax.py", "engine/step.py", *taken]
    without_returns = list(dict.fromkeys(way if platform == "cuda" else [*way, "norms.py"]))
    assert without_returns == (listed[:-1] if platform == "cuda" else listed)


TWO = {"kernel": (4, 6), "bias": (6,)}
FOUR = {"in": (3, 4, 6), "out": (3, 6, 6), "bias": (6,), "embed": (10, 6)}


@pytest.mark.parametrize(
    ("optimizer", "shapes", "most"),
    [
        (lb.lamb(1e-3, weight_decay=0.01), TWO, 1670),
        (lb.muonh(1e-3, ns_steps=1, stacked=lb.stacked_layers({"in|out": 0})), FOUR, 3850),
    ],
    ids=["LAMB", "MuonH in stacks"],
)
def test_calls_of_python_when_a_step_is_traced_and_lowered(optimizer, shapes, most):
    """Requests are checked in the first run alone, and each program is read once."""
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    state, calls = optimizer.init(params), 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE)

    jax.clear_caches()
    sys.setprofile(count)
    try:
        jax.jit(optimizer.update).lower(params, state, params)
    finally:
        sys.setprofile(None)
    assert calls <= most


def test_the_engine_is_small():
    tokens = {file.relative_to(PACKAGE): tokens_of([file]) for file in ENGINE.rglob("*.py")}
    assert len(tokens) <= 24
    assert sum(tokens.values()) <= 23_750
    assert max(tokens.values()) <= 2570
    assert tokens_of([PACKAGE / "testing" / "reference.py"]) <= 945
    for folder in [PACKAGE, *(x for x in PACKAGE.rglob("*") if x.is_dir())]:
        assert len([x for x in folder.iterdir() if x.suffix == ".py"]) <= 25, folder


def test_no_process_is_asked_where_a_step_runs():
    asked = re.compile(r"default_backend|device_count|cpu_count")
    found = {
        file.relative_to(PACKAGE).as_posix(): asked.findall(without_examples(file))
        for file in PACKAGE.rglob("*.py")
    }
    # The one documented place: the number of cores, on which the way to add up a leaf depends.
    assert {name: x for name, x in found.items() if x} == {"engine/sums.py": ["cpu_count"]}


def without_examples(file):
    """The lines of a file that are no examples in docstrings."""
    lines = file.read_text().splitlines()
    return "\n".join(x for x in lines if not x.strip().startswith((">>>", "...")))
