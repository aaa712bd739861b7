"""Every argument of every public function: a wrong value is an error that names it.

Each argument of an optimizer, of a link and of a schedule has an effect, too. A new argument has to
be entered in `WRONG` and, of those, in `CHANGED`.
"""

import dataclasses
import functools
import inspect
import json
import math
from pathlib import Path
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.engine.to_optax import leaf_transform_of
from optax_largebatch.testing import reference
from tests.test_public_signatures import OF_OPTAX


@functools.wraps(lb.small_batches_of_devices)
def on_two_devices(*operands, **settings):
    own = functools.partial(lb.small_batches_of_devices, *operands, **settings)
    return jax.vmap(lambda device: own(), axis_name="data", axis_size=2)(jnp.zeros(2))


PUBLIC = {name: getattr(lb, name) for name in lb.__all__}
PUBLIC |= {f"recipes.{name}": getattr(lb.recipes, name) for name in lb.recipes.__all__}
FUNCTIONS = {name: own for name, own in PUBLIC.items() if inspect.isfunction(own)}
FUNCTIONS["small_batches_of_devices"] = on_two_devices
FUNCTIONS |= {"PlannedRate": lb.PlannedRate, "TunedRun": lb.TunedRun}
"""The other classes are what functions return."""


def arguments(name):
    return inspect.signature(FUNCTIONS[name]).parameters


EACH = [(name, argument) for name in sorted(FUNCTIONS) for argument in arguments(name)]


# What is refused.

NO_NUMBERS = ("0.5", True, [], {}, 1j, np.ones(3), jnp.ones(3), jnp.asarray(True), np.str_("0.5"),
              np.asarray("0.5"), np.bool_(True), np.datetime64("2020-01-01"), b"0.5")  # fmt: skip


def number(interval):
    """What is no number in an interval, close to its ends too."""
    low, high = map(float, interval[1:-1].split(","))
    ends = [low if interval[0] == "(" else np.nextafter(low, -math.inf)]
    ends += [high] * (interval[-1] == ")") or [np.nextafter(high, math.inf)] * (high < math.inf)
    return [*ends, math.nan, 10**400, 1e300, *NO_NUMBERS, None]


def integer(least):
    wrong = [least - 1, -(10**12), least + 0.5, float(least), math.nan, math.inf]
    return [*wrong, *NO_NUMBERS, None, jnp.asarray(least), np.asarray([least])]


def count(least):
    """What is no whole number, which may be written as `"2M"`."""
    wrong = [least - 1, least + 0.5, math.nan, math.inf, 10**400, -1.0, "many", "1.5", "-1"]
    wrong += ["1e3", "1_000", "\u0665", "2\u212a", "5" * 5000, 1e300, np.asarray([5]), object()]
    return [*wrong, *NO_NUMBERS[1:], None]


CHOICE = ["nothing", "", 1, True, b"linear", None]
FLAG = [0, 1, "yes", None, np.ones(2)]
DTYPE = ["int32", "nothing", 3, 1.5, np.ones(3), jnp.float8_e4m3fn, jnp.dtype("float8_e5m2")]
BOUNDS = [1.0, (1.0, 0.5), (1.0,), (0.1, 1.0, 2.0), (-1.0, None), (None, 0.0), (math.nan, None),
          (None, math.nan), ("0.1", None), (None, True), (math.inf, None), [0.1, 1.0]]  # fmt: skip
MASK = [True, False, "bias", 3]
OPTIMIZER = [0.1, "adam", lb.lamb, optax.sgd]
RATE = number("[0, inf)")
POSITIVE = number("(0, inf)")

WRONG = {
    argument: wrong
    for these, wrong in (
        ("b1 b2 beta decay momentum smoothing", number("[0, 1)")),
        ("backoff_factor confidence factor", number("(0, 1)")),
        ("warmup_start", number("[0, 1]")),
        ("target", number("(-inf, inf)")),
        ("warmup_begin_step", number("(-inf, 0]")),
        ("growth_factor", number("(1, inf)")),
        ("initial_scale", number("[1, 1e38]")),
        ("target_rms", number("(0, 10]")),
        ("adam_eps end_value eps eps_root larc_learning_rate learning_rate others", RATE),
        ("min_norm peak_value scalar_lr_scale scalar_scale", RATE),
        ("speed trust_ratio_eps warmup_batches", RATE),
        ("warmup_begin_value warmup_epochs weight_decay", RATE),
        ("bias_learning_rate clip_gradient clipping_scale consistent_rms deviations", POSITIVE),
        ("half_life lr_batches lr_epochs max_change max_grad_norm", POSITIVE),
        ("max_norm max_value min_rms param_max param_max_rms", POSITIVE),
        ("param_min_rms power radius rms_eps run_length steps_per_epoch", POSITIVE),
        ("times trust_coefficient updates_per_epoch", POSITIVE),
        ("batch_scale batch_size devices epochs", integer(1)),
        ("evaluate_every every examples growth_interval increment", integer(1)),
        ("itemsize lr_est_period max_in_a_row max_steps", integer(1)),
        ("micro_batch_size ns_steps number period runs", integer(1)),
        ("sequence_length steps_per_stair total_steps", integer(1)),
        ("decay_begin_step hold_steps max_fullcov_size ndim seed step warmup_steps", integer(0)),
        ("output_axis", integer(-1)),
        ("window", integer(2)),
        ("largest_batch total", count(1)),
        ("hold warmup", count(0)),
        ("adaptive averaging cautious clip eps_is_floor grad_averaging ns_gram", FLAG),
        ("learning_rate_in_momentum nesterov scalars_only", FLAG),
        ("at_bounds bias_correction decay_kind denominator of", CHOICE),
        ("law optimizer order preconditioning shape_factor side strategy", CHOICE),
        ("warmup_strategy zero_ratio", CHOICE),
        ("accumulator_dtype dtype mu_dtype ns_dtype", DTYPE),
        ("param_norm_bounds rms_bounds trust_ratio_bounds", BOUNDS),
        ("adamh_mask mask matrix_mask trust_ratio_mask weight_decay_mask", MASK),
        ("convert", [1, "stack", jnp.stack]),
        ("forget", [False, "bias", 3]),
        ("branches transforms", OPTIMIZER),
        ("inner", [*OPTIMIZER, None]),
        ("groups", [1, {}, "bias", {"params": lb.matching("bias")}]),
        ("kinds", ["nothing", 1, None]),
        ("matrix_axes", [3, "kernel"]),
        ("ns_coeffs", ["nothing", 1, (1, 2), None]),
        ("stacked", [0, "kernel", True, [0]]),
        ("drop_steps", [5, None, "5", [0], [1.5], ["5"], [True], [[5]]]),
        ("values", ["0.5", 0.5, None, [], [0.5, math.nan], ["x"], [[0.5]], [10**400]]),
        ("when", [0, "yes", None, jnp.ones(2, bool)]),
    )
    for argument in these.split()
}
"""For each argument, wherever it is, wrong values. None is one unless it is the default."""

WRONG_IN = {
    ("PlannedRate", "decay"): CHOICE,
    ("TunedRun", "batch_size"): count(1),
    ("TunedRun", "learning_rate"): [*number("[0, 1e10]"), None],
    ("TunedRun", "weight_decay"): number("[0, 1e10]"),
    ("TunedRun", "note"): [1, [], None],
    ("PlannedRate", "peak_value"): number("(0, 1e10]"),
    ("PlannedRate", "end_value"): number("[0, 1e10]"),
    ("accumulate_gradients", "small_batches"): [0, -1, 1.5, "2", None, jnp.asarray(2)],
    ("batch_plan", "run"): [0.1, "adamw", {}],
    ("batch_plan", "stages"): [0, -1, 1.5, "0:0", "5:8", "0:8 0:8", [], [(0, 0)], {1: 8}, None],
    ("decay_to_target_rms", "weight_decay"): number("[0, 0.1]"),
    ("eve", "weight_decay"): number("[0, 0.1]"),
    ("fit_critical_batch_size", "batch_sizes"): [[1, 2], [0, 1, 2], [1, 2, math.nan], ["a"] * 3, 5],
    ("fit_critical_batch_size", "steps"): [[1, 2], [3, 0, 1], [3, 2, math.nan], ["a"] * 3, 5],
    ("large_batch_warmup", "batch_scale"): number("[1, inf)"),
    ("large_batch_warmup", "warmup_steps"): RATE,
    ("master_weights", "dtype"): [*DTYPE, None, "bfloat16"],
    ("matrix_groups", "sides"): [5, (4,), (4, 0), (4, 1.5), "ab", None],
    ("normalize_neurons", "eps"): POSITIVE,
    ("scale_batch_size", "power"): number("(-inf, inf)"),
    ("scale_by_factored_parameter_rms", "eps"): POSITIVE,
    ("seesaw", "batch_size"): count(1),
    ("clip_by_median_norm", "window"): integer(1),
    ("small_batches_of_devices", "batch_size"): POSITIVE,
    ("small_batches_of_examples", "batch_size"): POSITIVE,
    ("warmup_decay", "decay"): CHOICE,
    ("warmup_inverse_sqrt", "warmup_steps"): integer(1),
    ("within_critical_batch_size", "batch_size"): count(1),
}
"""The same where an argument of one function has another range."""

DATA = json.loads(Path(__file__).with_name("public_arguments.json").read_text())
OPERANDS = DATA["operands"]
"""Trees, states, functions, names and lists: the tests of each function have what it refuses."""

PARAMS = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
OF_EXAMPLES = {"kernel": jnp.ones((2, 4, 3)), "bias": jnp.ones((2, 3))}
LAMB = lb.lamb(0.1)
TRAINED = {"optimizer": LAMB, "state": LAMB.init(PARAMS), "params": PARAMS}
MEASURED = lb.measure_noise_scale().init(PARAMS)
REQUIRED = {"learning_rate": 0.1, "peak_value": 0.1, "inner": optax.sgd(0.1)}
VALID = {
    "accumulate_gradients": {"every": 2},
    "adopt_state": TRAINED | {"step": 1},
    "at_least_ndim": {"ndim": 2},
    "TunedRun": {"optimizer": "lamb", "batch_size": 8, "total": 1000},
    "average_weights": {"half_life": 10.0},
    "batch_plan": {
        "stages": 8, "total": 1000,
        "run": lb.TunedRun("lamb", batch_size=8, total=1000, learning_rate=0.1),
    },
    "chain": {"transforms": LAMB},
    "clamp_parameters": {"max_value": 1.0},
    "clip_by_global_norm": {"max_norm": 1.0},
    "clip_by_median_norm": {"clipping_scale": 2.0},
    "clip_by_value": {"max_value": 1.0},
    "diagnose": TRAINED,
    "explain": {"optimizer": LAMB, "params": PARAMS},
    "fit_critical_batch_size": {"batch_sizes": [64, 256, 1024], "steps": [5000, 2000, 1250]},
    "large_batch_warmup": {"batch_scale": 4, "warmup_steps": 10},
    "layer_noise_scales": {"state": MEASURED, "params": PARAMS},
    "matching_kinds": {"kinds": "bias"},
    "matrix_groups": {"number": 4, "sides": (8, 8), "axes": {"data": 2}},
    "measure_critical_batch_size": {
        "params": jnp.ones(2), "loss": lambda params, key, batch_size: jnp.sum(params**2),
        "make_optimizer": optax.sgd, "batch_sizes": [1, 2, 4], "learning_rates": [0.1],
        "evaluate": lambda params: jnp.sum(params**2), "target": 1.0, "max_steps": 1,
    },
    "nesterov_split": {"inner": lb.chain(lb.add_decayed_weights(0.1), lb.scale_by_trust_ratio())},
    "noise_scale": {"state": MEASURED},
    "planned_optimizer": {
        "params": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)},
        "plan": lb.batch_plan(
            8, total=1000, run=lb.TunedRun("lamb", batch_size=8, total=1000, learning_rate=0.1)
        ),
    },
    "recipes.get": {"name": "bert-large/lamb/mlperf", "batch_size": 8192},
    "recipes.ramp": {"name": "deepseek-v3", "increment": 3072},
    "scale_batch_size": {"batch_size": 8, "run_length": 2.0},
    "seesaw": {"batch_size": 8, "largest_batch": 64},
    "small_batches_of_devices": {
        "gradients": PARAMS, "params": PARAMS, "axis_name": "data", "mean": PARAMS,
    },
    "small_batches_of_examples": {"gradients": OF_EXAMPLES, "params": PARAMS, "mean": PARAMS},
    "step_metrics": {"state": LAMB.init(PARAMS), "params": PARAMS},
    "sum_of": {"branches": LAMB},
    "trust_ratios": TRAINED,
    "values_schedule": {"values": [1.0, 0.5, 0.1]},
    "warmup_decay": {"total_steps": 10, "decay": "power", "power": 0.5},
    "warmup_drops": {"drop_steps": [5]},
    "warmup_inverse_sqrt": {"warmup_steps": 4},
    "with_partition_specs": {"partition_specs": {}},
    "within_critical_batch_size": {"measured": {0: 8}, "batch_size": 8, "largest_batch": 64},
}  # fmt: skip
"""What a function has to be given besides `REQUIRED`."""
TAKE_NONE = ("clip_by_global_norm", "clip_by_value", "clip_by_median_norm")
"""Functions whose first argument may be None, and has to be given all the same."""


def call(name, **changes):
    known = arguments(name)
    given = {
        key: own
        for key, own in REQUIRED.items()
        if key in known and known[key].default is inspect.Parameter.empty
    }
    given |= VALID.get(name, {}) | changes
    several = [key for key in given if known[key].kind is inspect.Parameter.VAR_POSITIONAL]
    return FUNCTIONS[name](*[given.pop(key) for key in several], **given)


CHECKED = [one for one in EACH if one[1] not in OPERANDS.get(one[0], "").split()]


def test_every_argument_is_entered():
    missing = [one for one in CHECKED if one[1] not in WRONG and one not in WRONG_IN]
    assert not missing


def test_no_entry_is_left_over():
    operands = {(name, own) for name, these in OPERANDS.items() for own in these.split()}
    assert {*WRONG_IN} | operands <= {*EACH}
    assert {*WRONG} <= {argument for _, argument in CHECKED}
    assert all(key in arguments(name) for name, given in VALID.items() for key in given)


@pytest.mark.parametrize("name", sorted({name for name, _ in CHECKED}))
def test_a_valid_call(name):
    if name != "measure_critical_batch_size":  # it would train; its arguments are checked before
        call(name)


def words(name, argument):
    """The words that the annotation of an argument allows."""

    def found(annotation):
        literal = typing.get_origin(annotation) is typing.Literal
        for own in typing.get_args(annotation):
            yield from [own] if literal else found(own)

    return {*found(arguments(name)[argument].annotation)} if argument in WORDS else set()


WORDS = [argument for argument, wrong in WRONG.items() if wrong is CHOICE]


@pytest.mark.parametrize(("name", "argument"), CHECKED)
def test_a_wrong_value(name, argument):
    takes_none = arguments(name)[argument].default is None or name in TAKE_NONE
    others = [words(*one) for one in CHECKED if one[1] == argument]
    words_of_others = set().union(*others) - words(name, argument)
    for value in [*WRONG_IN.get((name, argument), WRONG.get(argument)), *words_of_others]:
        if value is not None or not takes_none:
            refuses(name, argument, value)


def refuses(name, argument, value):
    has_no_name = arguments(name)[argument].kind is inspect.Parameter.VAR_POSITIONAL
    said = rf"{name}\(\)" if has_no_name else argument
    with pytest.raises((TypeError, ValueError), match=said) as raised:
        call(name, **{argument: value})
    assert type(raised.value) in (TypeError, ValueError)


@pytest.mark.parametrize("name", OF_OPTAX)
def test_numbers_by_default_are_those_of_optax(name):
    for key, theirs in inspect.signature(OF_OPTAX[name]).parameters.items():
        ours = arguments(name).get(key, theirs).default
        if isinstance(theirs.default, float | int) and ours is not None:  # None is decided later
            assert ours == theirs.default, key


# What an argument does.

MATRICES = ("kernel", "cube")
SHAPES = {"kernel": (8, 3), "cube": (2, 3, 4), "bias": (3,), "scale": (), "zero": (2,)}
rng = np.random.default_rng(0)
TREE, *GRADIENTS = [
    {name: jnp.asarray(rng.normal(size=shape), "float32") for name, shape in SHAPES.items()}
    for _ in range(5)
]
TREE |= {"cube": TREE["cube"].at[0].multiply(0.01), "zero": jnp.zeros(2)}
ONE = lb.matching("kernel")

CHANGED = {
    argument: value
    for these, value in (
        *DATA["changed"].items(),
        ("param_norm_bounds rms_bounds", (None, 0.1)),
        ("trust_ratio_bounds", (0.3, 0.4)),
        ("adamh_mask mask matrix_mask trust_ratio_mask", ONE),
        ("weight_decay_mask", lb.matching("bias")),
        ("groups", lb.param_groups({"params": ONE, "learning_rate_scale": 0.5})),
        ("matrix_axes", {"cube": (0, (1, 2))}),
        ("inner", lb.chain(lb.add_decayed_weights(0.1), lb.scale_by_trust_ratio(eps=1.0))),
        ("branches transforms", lb.scale_by_adam()),
        ("others", lb.lamb(0.1)),
    )
    for argument in these.split()
}
"""Another value of each argument that is no flag, of optimizers, links and schedules."""

CUBE_AS_MATRIX = {"matrix_axes": {"cube": ((0, 1), 2)}}
SETTINGS = {"weight_decay": 0.01, "momentum": 0.9}
"""What makes masks and Nesterov's momentum matter."""
SETTINGS_OF = {
    "clip_by_median_norm": {"window": 3},
    "eden": {"steps_per_epoch": 3, "warmup_batches": 4},
    "eden2": {"warmup_batches": 4},
    "lbsgd": {"batch_scale": 2, "warmup_epochs": 2, "updates_per_epoch": 9},
    "muon": CUBE_AS_MATRIX,
    "muonh": CUBE_AS_MATRIX,
    "normalize_neurons": CUBE_AS_MATRIX,
    "orthogonalize_momentum": CUBE_AS_MATRIX,
    "scale_by_matrix_shape": CUBE_AS_MATRIX,
    "warmup_decay": {"warmup_steps": 2},
    "warmup_drops": {"warmup_steps": 2},
}
WITH = {
    ("add_decayed_weights", "stacked"): {
        "weight_decay_mask": lb.at_least_ndim(2),
        "stacked": {"kernel": 0},
    },
    ("clamp_parameters", "stacked"): {"scalars_only": True, "stacked": {"bias": 0}},
    ("lbsgd", "trust_ratio_mask"): {"warmup_strategy": "lars"},
    ("learn_log_scale", "at_bounds"): {"rms_bounds": (None, 0.1)},
    ("muon", "eps_is_floor"): {"eps": 9.0},
    ("muon", "stacked"): {"matrix_axes": None},
    ("muonh", "stacked"): {"matrix_axes": None},
    ("nesterov_split", "learning_rate"): {"order": "sequential"},
    ("nesterov_split", "order"): {"learning_rate": 0.5},
    ("orthogonalize_momentum", "eps_is_floor"): {"eps": 9.0},
    ("scale_by_second_moment", "bias_correction"): {"bias_correction": "lagged"},
    ("scale_by_second_moment", "stacked"): {"bias_correction": "lagged", "stacked": {"bias": 0}},
    ("scale_by_trust_ratio", "zero_ratio"): {"trust_coefficient": 0.5},
}
"""What else an argument of a function needs to matter, and its value if that is another."""
WITHOUT_EFFECT = {
    ("normalize_neurons", "stacked"),
    ("orthogonalize_momentum", "stacked"),
    ("scale_by_matrix_shape", "stacked"),
}
"""Where `matrix_axes` says rows and columns, the matrices of a stack are apart already."""

COMMON, OF_OTHERS = DATA["common"], DATA["of_others"]
"""Of optimizers that move matrices in one way and the others in another: what both ways have."""

SLOW = {"cain", "clip_by_median_norm", "lbsgd", "learned_gradient"}
SLOW |= {"scale_by_factored_parameter_rms"}
"""What compiles a loop or a branch for each run."""


def is_transform(name):
    """Whether it is an optimizer or a link; the wrappers have tests of their own."""
    returned = inspect.signature(FUNCTIONS[name]).return_annotation
    is_one = isinstance(returned, type) and issubclass(returned, optax.GradientTransformation)
    return is_one and (name == "nesterov_split" or "inner" not in arguments(name))


OF_THEIR_OWN = ("measure_noise_scale", "planned_optimizer")
TRANSFORMS = [name for name in FUNCTIONS if is_transform(name) and name not in OF_THEIR_OWN]
SCHEDULES = [
    name for name in FUNCTIONS if name.startswith(("eden", "large_", "values_", "warmup_"))
]
USED = [(name, argument) for name in (*TRANSFORMS, *SCHEDULES) for argument in arguments(name)]


def results(name, **changes):
    """What comes out in a few steps: of a schedule its values, of others the updates and states."""
    settings = {key: own for key, own in SETTINGS.items() if key in arguments(name)}
    own = call(name, **settings | SETTINGS_OF.get(name, {}) | changes)
    if name in SCHEDULES:
        return [own(step) for step in range(12)]
    only_matrices = SETTINGS_OF.get(name) == CUBE_AS_MATRIX and name not in COMMON
    tree = {key: TREE[key] for key in (MATRICES if only_matrices else SHAPES)}
    own = reference(own) if leaf_transform_of(own) else own
    params, state, seen = tree, own.init(tree), []
    for gradients in GRADIENTS:
        updates, state = own.update({key: gradients[key] for key in tree}, state, params)
        params = optax.apply_updates(params, updates)
        seen.append((updates, state))
    return seen


as_it_is = functools.cache(results)


def differ(one, other):
    """Whether numbers, shapes or types of arrays are not the same."""
    one, other = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(one) != len(other) or any(
        x.dtype != y.dtype or not np.array_equal(x, y, equal_nan=True)
        for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "argument"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one[0] in SLOW)) for one in USED],
)
@pytest.mark.filterwarnings("ignore:.*may be matrices")
def test_an_argument_has_an_effect(name, argument):
    default = arguments(name)[argument].default
    other = not default if isinstance(default, bool) else CHANGED[argument]
    needs = WITH.get((name, argument), {})
    besides = {key: own for key, own in needs.items() if key != argument}
    before = results(name, **besides) if besides else as_it_is(name)
    after = results(name, **{argument: other} | needs)
    assert differ(before, after) == ((name, argument) not in WITHOUT_EFFECT)
    if name in COMMON:
        updates = [[updates for updates, _ in own] for own in (before, after)]
        moved = {key for key in SHAPES if differ(*([x[key] for x in own] for own in updates))}
        of_others = argument in OF_OTHERS[name].split()
        expected = (not of_others, of_others or argument in COMMON[name].split())
        assert (bool(moved & {*MATRICES}), bool(moved - {*MATRICES})) == expected


def test_every_change_is_of_an_argument():
    assert {*WITH} | WITHOUT_EFFECT <= {*USED}
    assert {*CHANGED} <= {argument for _, argument in USED}
    assert {*SETTINGS_OF} | {*COMMON} | SLOW <= {name for name, _ in USED}


# What else would be silent.


@pytest.mark.parametrize(
    "name",
    ["bert-large/lamb/mlperf", "bert-large/lans/paper-phase1", "resnet50/lars/simclr",
     "resnet50/larc/vissl-simclr", "resnet50/sgd/linear", "nanochat-d24/muon/speedrun",
     "gpt2-124m/muonh/track-3"],
)  # fmt: skip
def test_a_recipe_prints_each_number_by_its_name(name):
    recipe = lb.recipes.get(name, batch_size=lb.recipes.batch_sizes(name)[0])
    named = ("learning_rate", "b1", "b2", "eps", "momentum", "weight_decay")
    known = [own for own in named if getattr(recipe, own) is not None]
    if recipe.algorithm == "muonh":
        known.remove("weight_decay")
    numbers = {own: 0.123 + 0.1 * index for index, own in enumerate(known)}
    said = dataclasses.replace(recipe, **numbers).summary()
    for own, value in numbers.items():
        assert re.findall(rf"\b{own} ([\d.]+\d)", said)[0] == f"{value:.3f}", own
