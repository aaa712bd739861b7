"""The trip of one gradient, as engine/README.md tells it, and the size of its rooms."""

import ast
import io
from pathlib import Path
import re
import tokenize
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
    """The files that the README lists."""
    names = re.findall(r"^\| \d \| `([\w./]+)` \|.*\|$", (ENGINE / "README.md").read_text(), re.M)
    return [(ENGINE / name).resolve().relative_to(PACKAGE).as_posix() for name in names]


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_trip_of_a_gradient(monkeypatch, platform):
    stacks = []

    def noting(own):
        def noted(*args, **kwargs):
            stacks.append(files(traceback.extract_stack()))
            return own(*args, **kwargs)

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
    listed, way = told(), ["engine/to_optax.py", "engine/step.py", *taken]
    without_returns = list(dict.fromkeys(way if platform == "cuda" else [*way, "norms.py"]))
    assert without_returns == (listed[:-1] if platform == "cuda" else listed)
    assert len(listed) <= 8


def lines_of_code(file):
    """The lines of a file that are not blank, a comment or a docstring."""
    source = file.read_text()
    words = {
        node.value.lineno + k
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for k in range(node.value.end_lineno - node.value.lineno + 1)
    }
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines = set()
    for own in tokenize.generate_tokens(io.StringIO(source).readline):
        if own.type not in (*no_code, tokenize.ENDMARKER):
            lines |= {*range(own.start[0], own.end[0] + 1)}
    return len(lines - words)


def test_the_engine_is_small():
    own = {file.relative_to(ENGINE): lines_of_code(file) for file in ENGINE.rglob("*.py")}
    on_matrices = sum(n for file, n in own.items() if file.parts[0] == "matrices")
    assert len(own) <= 26
    assert on_matrices <= 490
    assert sum(own.values()) - on_matrices <= 1680
    for file in ENGINE.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 250, file


def test_rooms_are_small():
    for folder in [PACKAGE, *(x for x in PACKAGE.rglob("*") if x.is_dir())]:
        own = [x for x in folder.iterdir() if x.suffix == ".py"]
        assert len(own) <= 25, folder
    assert len((PACKAGE / "testing" / "reference.py").read_text().splitlines()) <= 120


def test_no_process_is_asked_where_a_step_runs():
    asked = re.compile(r"default_backend|device_count|cpu_count")
    found = {
        file.relative_to(PACKAGE).as_posix(): asked.findall(code_of(file))
        for file in PACKAGE.rglob("*.py")
    }
    # The one documented place: the number of cores, of which the way to add up a leaf depends.
    assert {name: own for name, own in found.items() if own} == {"engine/sums.py": ["cpu_count"]}


def code_of(file):
    """The lines of a file that are no examples in docstrings."""
    lines = file.read_text().splitlines()
    return "\n".join(x for x in lines if not x.strip().startswith((">>>", "...")))
