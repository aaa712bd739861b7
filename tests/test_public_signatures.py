"""Public functions take their arguments as those of optax do, or by keyword."""

import inspect
import operator
import re

import optax
import optax.contrib
import pytest

import optax_largebatch as lb

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
FUNCTIONS = {
    name: getattr(lb, name) for name in lb.__all__ if inspect.isfunction(getattr(lb, name))
} | {"PlannedRate": lb.PlannedRate}
OF_OPTAX = {
    "accumulate_gradients": optax.MultiSteps,
    "accumulate_momentum": optax.trace,
    "add_decayed_weights": optax.add_decayed_weights,
    "clip_by_global_norm": optax.clip_by_global_norm,
    "clip_by_value": optax.clip,
    "lamb": optax.lamb,
    "lars": optax.lars,
    "muon": optax.contrib.muon,
    "muonh": optax.contrib.muon,
    "scale_by_adam": optax.scale_by_adam,
    "scale_by_learning_rate": optax.scale_by_learning_rate,
    "scale_by_trust_ratio": optax.scale_by_trust_ratio,
    "skip_bad_steps": optax.apply_if_finite,
}
"""What does the same in optax, with arguments of the same kind."""
OF_ONE_NAME = {name for name, own in OF_OPTAX.items() if own.__name__ == name}
OPERANDS = {
    "adopt_state": "optimizer params state",
    "averaged_params": "optimizer state params",
    "check_gradient_reduction": "loss params gradients",
    "diagnose": "optimizer state params",
    "explain": "optimizer params",
    "fit_critical_batch_size": "batch_sizes steps",
    "layer_noise_scales": "state params",
    "measure_critical_batch_size": "params loss make_optimizer",
    "optimizer_state_shardings": "optimizer params mesh",
    "planned_optimizer": "plan params",
    "small_batches_of_devices": "gradients params",
    "small_batches_of_examples": "gradients params",
    "step_metrics": "state params",
    "trust_ratios": "optimizer state params",
    "with_partition_specs": "inner partition_specs",
}
"""Functions that work on several things; what decides how they work is given by keyword."""


def parameters(function):
    return inspect.signature(function).parameters


def positional(function):
    return [name for name, own in parameters(function).items() if own.kind in POSITIONAL]


@pytest.mark.parametrize("name", sorted(OF_ONE_NAME))
def test_positions_are_those_of_optax(name):
    theirs, ours = positional(OF_OPTAX[name]), positional(FUNCTIONS[name])
    theirs = ["weight_decay_mask" if own == "mask" else own for own in theirs]
    assert ours == theirs


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - OF_ONE_NAME))
def test_all_others_take_settings_by_keyword(name):
    allowed = OPERANDS.get(name, "").split() or positional(FUNCTIONS[name])[:1]
    assert positional(FUNCTIONS[name]) == allowed


def keywords():
    """The arguments in optax that are not arguments of the function here."""
    for name, theirs in OF_OPTAX.items():
        for argument in parameters(theirs):
            if argument not in parameters(FUNCTIONS[name]):
                yield pytest.param(name, argument, id=f"{name}-{argument}")


@pytest.mark.parametrize(("name", "argument"), [*keywords()])
def test_a_keyword_of_optax_is_told_its_place(name, argument):
    says = rf"{name}\(\) has no argument '{argument}', got 0.5\. (Here it is called '(\w+)'|[A-Z])"
    with pytest.raises(TypeError, match=says) as raised:
        FUNCTIONS[name](0.1, **{argument: 0.5})
    known = re.search(says, str(raised.value))[2]
    assert known is None or known in parameters(FUNCTIONS[name])


@pytest.mark.parametrize(
    ("name", "argument", "here"),
    [
        ("adamh", "mask", "it would do nothing"),
        ("cain", "nu_dtype", "stops growing"),
        ("lans", "clip_gradient", "lb.nesterov_split"),
        ("lars", "clip_gradient", "lb.scale_by_lars"),
        ("lbsgd", "begin_epoch", "restore its state"),
        ("learned_gradient", "meta_lr_scale", "icefall's value"),
        ("muonh", "preconditioning", "orthogonalize_momentum"),
        ("decay_to_target_rms", "mask", "weight_decay_mask"),
        ("orthogonalize_momentum", "weight_dimension_numbers", "matrix_axes"),
        ("scale_by_lars", "mask", "weight_decay_mask"),
        ("scale_by_matrix_shape", "weight_dimension_numbers", "matrix_axes"),
        ("warmup_decay", "decay_steps", "total_steps"),
        ("warmup_decay", "init_value", "warmup_begin_value"),
    ],
)
def test_a_keyword_of_a_relative_in_optax(name, argument, here):
    with pytest.raises(TypeError, match=rf"{name}\(\) has no argument '{argument}'.*{here}"):
        FUNCTIONS[name](0.1, **{argument: 0.5})


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("ScaleByAdamState", "states.ScaleByAdamState"),
        ("MultiSteps", "accumulate_gradients"),
        ("apply_if_finite", "skip_bad_steps"),
    ],
)
def test_a_name_of_optax(name, here):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; here it is called '{here}'"):
        getattr(lb, name)
    assert operator.attrgetter(here)(lb)


def test_any_other_name_is_unknown():
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        _ = lb.nothing
