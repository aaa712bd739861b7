"""The trip of one gradient, as engine/README.md tells it, and the size of its rooms."""

from pathlib import Path
import re
import traceback

import jax
import jax.numpy as jnp
import pytest

import optax_largebatch as lb
from optax_largebatch import norms

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


def told():
    """The files that the README lists, and the one that it names for a CPU."""
    rows = re.findall(r"^\| \d \| `([\w./]+)` \|(.*)\|$", (ENGINE / "README.md").read_text(), re.M)
    names = [row for row, _ in rows]
    on_cpu = re.search(r"on one CPU `([\w./]+)`", " ".join(text for _, text in rows))[1]
    return [(ENGINE / name).resolve().relative_to(PACKAGE).as_posix() for name in names], on_cpu


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_trip_of_a_gradient(monkeypatch, platform):
    listed, on_cpu = told()
    if platform == "cpu":
        listed = [f"engine/{on_cpu}" if "reductions" in name else name for name in listed]
    stacks = []
    block_sum = norms.block_sum

    def noting(*args, **kwargs):
        stacks.append(files(traceback.extract_stack()))
        return block_sum(*args, **kwargs)

    params = {"kernel": jnp.ones((100, 100))}
    optimizer = lb.lamb(1e-3)
    traced = jax.jit(optimizer.update).trace(params, optimizer.init(params), params)
    monkeypatch.setattr(norms, "block_sum", noting)
    traced.lower(lowering_platforms=(platform,))
    assert stacks
    # The step is lowered after it is traced, so that its way begins anew at `placement.py`.
    way = ["engine/to_optax.py", "engine/step.py", *stacks[0], "norms.py"]
    without_returns = list(dict.fromkeys(way))
    assert without_returns == listed
    assert len(listed) <= 8


def test_rooms_are_small():
    for folder in [PACKAGE, *(x for x in PACKAGE.rglob("*") if x.is_dir())]:
        own = [x for x in folder.iterdir() if x.suffix == ".py"]
        assert len(own) <= 20, folder
    for file in ENGINE.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 350, file
    assert len((ENGINE / "reference_executor.py").read_text().splitlines()) <= 100


def test_no_process_is_asked_where_a_step_runs():
    asked = re.compile(r"default_backend|device_count|cpu_count")
    found = {
        file.relative_to(PACKAGE).as_posix(): asked.findall(code_of(file))
        for file in PACKAGE.rglob("*.py")
    }
    # The one documented place: the number of cores, of which the way to add up a leaf depends.
    assert {name: own for name, own in found.items() if own} == {
        "engine/reductions/cpu.py": ["cpu_count"]
    }


def code_of(file):
    """The lines of a file that are no examples in docstrings."""
    lines = file.read_text().splitlines()
    return "\n".join(x for x in lines if not x.strip().startswith((">>>", "...")))
