"""The commands of `python -m optax_largebatch`."""

import dataclasses
import inspect
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
from orbax.checkpoint import PyTreeCheckpointer, StandardCheckpointer
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


SHAPES = {
    "dense": {"kernel": [3, 4], "bias": [4]},
    "layers": {"kernel": [6, 4, 4], "bias": [6, 4]},
    "norm": {"scale": [4]},
}
MASKS = ("--weight-decay-mask", "~bias", "~scale", "--trust-ratio-mask", "kernel")


def arrays(node):
    if isinstance(node, dict):
        return {name: arrays(value) for name, value in node.items()}
    return np.zeros(node, np.float32)


@pytest.fixture(params=["json", "npz", "orbax"])
def checkpoint(request, tmp_path):
    """The same shapes in a file of each kind, under a name where that can be."""
    if request.param == "json":
        path = tmp_path / "shapes.json"
        path.write_text(json.dumps({"state": {"params": SHAPES, "count": []}}))
        return (str(path), "--under", "state/params")
    if request.param == "npz":
        path = tmp_path / "params.npz"
        flat = {f"{a}/{b}": arrays(shape) for a, own in SHAPES.items() for b, shape in own.items()}
        np.savez(path, **flat)
        return (str(path),)
    path = tmp_path / "saved"
    with StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"params": arrays(SHAPES), "step": np.zeros((), np.int32)})
    return (str(path), "--under", "params")


def test_explains_a_checkpoint(capsys, checkpoint):
    command = ("explain", *checkpoint, *MASKS, "--stacked", "layers/=0")
    said = {line.split()[0]: line.split()[1:] for line in printed(capsys, *command).splitlines()}
    assert said["dense/kernel"] == ["3x4", "1", "yes", "yes", "-"]
    assert said["dense/bias"] == ["4", "1", "-", "-", "-"]
    assert said["layers/kernel"] == ["6x4x4", "6", "yes", "yes", "-"]
    assert said["norm/scale"] == ["4", "1", "-", "-", "-"]
    lines = json.loads(printed(capsys, *command, "--json"))
    assert {line["name"]: line["shape"] for line in lines} == {
        f"{a}/{b}": shape for a, own in SHAPES.items() for b, shape in own.items()
    }
    assert {line["name"] for line in lines if line["decayed"]} == {"dense/kernel", "layers/kernel"}


def test_stacks_of_two_axes(capsys, tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(SHAPES))
    (line,) = [
        line
        for line in json.loads(
            printed(capsys, "explain", str(path), "--stacked", "layers/kernel=0,1", "--json")
        )
        if line["name"] == "layers/kernel"
    ]
    assert line["blocks"] == 24


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--weight-decay-mask", "~bais"), "weight_decay_mask: the pattern 'bais' matches no"),
        (("--weight-decay-mask", "~bias", "kernel"), "--weight-decay-mask takes patterns that"),
        (("--stacked", "layers/"), "--stacked takes PATTERN=AXIS"),
        (("--stacked", "layers/=9"), "has no axis 9"),
        (("--under", "parms"), "under must name a part of the checkpoint: 'parms' is not in"),
    ],
)
def test_explain_says_what_is_wrong(capsys, tmp_path, options, said):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(SHAPES))
    assert main(("explain", str(path), *options)) == 2
    error = capsys.readouterr().err
    assert error.startswith("optax_largebatch explain: ")
    assert said in error


def test_explain_says_what_it_reads(capsys, tmp_path):
    (tmp_path / "wrong.json").write_text('{"bias": [4.5]}')
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("wrong.json", 'must hold shapes, as in {"bias": [4]}; it holds [4.5]'),
        ("missing.json", "missing.json"),
        ("params.txt", "must be a folder of Orbax, an .npz or a .json file"),
        ("empty", "must be a folder that Orbax has saved"),
    ):
        assert main(("explain", str(tmp_path / name))) == 2
        assert said in capsys.readouterr().err


def npz(path, compression=zipfile.ZIP_DEFLATED, **members):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)


def header(shape, dtype="<f4"):
    """An array of the format of NumPy, without its data."""
    written = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        written, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return written.getvalue()


def bomb(size=2**26):
    """An array whose header is long, and compressed to almost nothing."""
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", size) + b" " * size


class Malicious:
    """An object whose pickle, loaded, would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


BROKEN = {
    "empty.json": lambda path: path.write_text(""),
    "truncated.json": lambda path: path.write_text('{"dense": {"bias": [4'),
    "binary.json": lambda path: path.write_bytes(b"\x80\xff\x00"),
    "nested.json": lambda path: path.write_text('{"a":' * 100_000 + "[1]" + "}" * 100_000),
    "deep.json": lambda path: path.write_text('{"a":' * 500 + "[1]" + "}" * 500),
    "lists.json": lambda path: path.write_text("[" * 100_000 + "]" * 100_000),
    "digits.json": lambda path: path.write_text('{"a": [' + "9" * 5000 + "]}"),
    "large.json": lambda path: path.write_text('{"a": [' + "9" * 300 + "]}"),
    "long.json": lambda path: path.write_text(json.dumps({"a": ["x" * 99] * 9999})),
    "lines.json": lambda path: path.write_text('{"a": "one\\ntwo"}'),
    "huge.json": lambda path: (path.touch(), os.truncate(path, 2**36)),
    "nothing.json": lambda path: path.write_text("{}"),
    "null.json": lambda path: path.write_text('{"a": null, "b": NaN}'),
    "empty.npz": lambda path: path.write_bytes(b""),
    "truncated.npz": lambda path: path.write_bytes(zipped(path)[:-40]),
    "damaged.npz": lambda path: path.write_bytes(zipped(path).replace(b"NUMPY", b"PYNUM")),
    "no_zip.npz": lambda path: path.write_text("PK no"),
    "no_array.npz": lambda path: npz(path, a=b"text"),
    "no_header.npz": lambda path: npz(path, a=b"\x93NUMPY\x01\x00\xff\xff{"),
    "wrong_header.npz": lambda path: npz(path, a=header((4,)).replace(b"'shape'", b"'shope'")),
    "new_format.npz": lambda path: npz(path, a=b"\x93NUMPY\x09\x00"),
    "objects.npz": lambda path: npz(path, a=header((), "|O") + pickle.dumps(Malicious(path))),
    "nothing.npz": lambda path: npz(path),
    "negative.npz": lambda path: npz(path, a=header((-1, 3))),
    "flags.npz": lambda path: npz(path, a=header((True, 3))),
    "axes.json": lambda path: path.write_text(json.dumps({"a": [2**62] * 5000})),
    "bomb.npz": lambda path: npz(path, a=bomb()),
    "bzip2.npz": lambda path: npz(path, zipfile.ZIP_BZIP2, a=bomb()),
    "lzma.npz": lambda path: npz(path, zipfile.ZIP_LZMA, a=bomb()),
    "text": lambda path: (path.mkdir(), (path / "readme.txt").touch()),
    "huge": lambda path: (path.mkdir(), BROKEN["huge.json"](path / "_METADATA")),
    "folder": lambda path: path.mkdir(),
    "folder_of.json": lambda path: path.mkdir(),
    "no_metadata": lambda path: (path.mkdir(), (path / "_METADATA").write_text("{")),
    "link.json": lambda path: path.symlink_to(path),
    "fifo.json": lambda path: os.mkfifo(path),
    "device.json": lambda path: path.symlink_to("/dev/zero"),
}


def zipped(path):
    np.savez(path, a=np.ones(4))
    return path.read_bytes()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_line_and_no_traceback(capsys, caplog, tmp_path, name):
    path = tmp_path / name
    BROKEN[name](path)
    before = sorted(tmp_path.iterdir())
    assert main(("explain", str(path))) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith(f"optax_largebatch explain: {str(path)!r} cannot be read: ")
    assert error.count("\n") == 1
    assert len(error) < 800
    assert not caplog.records, "warnings of Orbax"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["bomb.npz", "bzip2.npz", "lzma.npz"])
def test_a_header_fills_no_memory(tmp_path, name):
    path = tmp_path / name
    BROKEN[name](path)
    assert path.stat().st_size < 2**17
    tracemalloc.start()
    assert main(("explain", str(path))) == 2
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**23  # the header has 2**26 bytes


def test_finds_the_checkpoint_in_the_folder_of_a_run(capsys, tmp_path):
    step = tmp_path / "run" / "100"
    with StandardCheckpointer() as checkpointer:
        checkpointer.save(step, {"kernel": np.ones((3, 4), np.float32)})
    assert main(("explain", str(tmp_path / "run"))) == 2
    assert f"Give a folder inside it, such as {str(step)!r}." in capsys.readouterr().err


def test_strings_in_a_checkpoint_are_left_out(capsys, tmp_path):
    with PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", {"a": np.ones(3, np.float32), "name": "lamb"})
    assert "1 parameters, 1 blocks, 3" in printed(capsys, "explain", str(tmp_path / "saved"))


STRANGE = {"red\x1b[31m\nline": [3], "turned\u202e": [2], "half\ud800": [1], "重み": [4]}


def test_names_cannot_write_on_the_terminal(capsys, tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(STRANGE))
    said = printed(capsys, "explain", str(path)).splitlines()
    assert [line.split()[0] for line in said[1:-1]] == [
        r"half\ud800", r"red\x1b[31m\nline", r"turned\u202e", "重み"
    ]  # fmt: skip
    lines = json.loads(printed(capsys, "explain", str(path), "--json"))
    assert {line["name"] for line in lines} == set(STRANGE)
    assert main(("explain", str(path), "--weight-decay-mask", "missing")) == 2
    error = capsys.readouterr().err
    assert r"names are: half\ud800, red\x1b[31m line, turned\u202e, 重み." in error


def test_long_names_are_cut(capsys, tmp_path):
    """All rows are as wide as the widest, and an error lists twelve names."""
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({f"{index}{'x' * 10**4}/kernel": [3] for index in range(100)}))
    said = printed(capsys, "explain", str(path)).splitlines()
    assert all(len(line) < 300 for line in said)
    assert said[1].startswith("0xxx")
    assert said[1].split()[0].endswith("x/kernel")
    for options in (("--weight-decay-mask", "missing"), ("--under", "missing")):
        assert main(("explain", str(path), *options)) == 2
        assert len(capsys.readouterr().err) < 1100


def test_a_file_of_windows(capsys, tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(SHAPES), encoding="utf-8-sig")
    assert "dense/kernel" in printed(capsys, "explain", str(path))


def test_shapes_are_read_without_the_data(capsys, tmp_path):
    """A terabyte, of which only the header is in the file."""
    path = tmp_path / "params.npz"
    npz(path, **{"dense/kernel": header((2**20, 2**18)), "dense/bias": header((2**18,))})
    said = printed(capsys, "explain", str(path))
    assert "1048576x262144" in said


def test_runs_as_a_module():
    command = [sys.executable, "-W", "error", "-m", "optax_largebatch", "recipes"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout == f"{recipes.table()}\n"


def test_a_terminal_without_unicode(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(STRANGE))
    command = [sys.executable, "-m", "optax_largebatch", "explain", str(path)]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, capture_output=True, check=True, timeout=120, env=ascii_only)
    assert rb"\u91cd\u307f" in run.stdout
    assert run.stderr == b""


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
