"""Every wrong argument and every wrong tree: what was wrong, and what is allowed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.optimizers.registry import OPTIMIZERS

RULE = lb.matching("kernel")

# For each argument: wrong values, the error, and what its message must say besides the name.
WRONG = {
    "learning_rate": [
        (-0.1, ValueError, "[0, inf), got -0.1"),
        ("0.1", TypeError, "schedule"),
        (None, TypeError, "schedule"),
        (True, TypeError, "schedule"),
        (float("nan"), ValueError, "[0, inf), got nan"),
        (jnp.ones(3), ValueError, "scalar"),
    ],
    "weight_decay": [
        (-1e-4, ValueError, "[0, inf), got -0.0001"),
        ("mild", TypeError, "'mild'"),
        (float("inf"), ValueError, "[0, inf), got inf"),
    ],
    "b1": [
        (1.0, ValueError, "[0, 1), got 1.0"),
        (-0.1, ValueError, "[0, 1)"),
        ("a", TypeError, ""),
    ],
    "b2": [(1.5, ValueError, "[0, 1), got 1.5"), (None, TypeError, "None")],
    "eps": [(-1e-8, ValueError, "[0, inf)"), ([], TypeError, "[]")],
    "eps_root": [(-1e-8, ValueError, "[0, inf)")],
    "momentum": [(1.0, ValueError, "[0, 1), got 1.0"), ("x", TypeError, "'x'")],
    "adam_eps": [(-1e-8, ValueError, "[0, inf)"), ("a", TypeError, "'a'")],
    "adamh_mask": [(False, TypeError, "~matching_kinds('bias'")],
    "eps_is_floor": [(0, TypeError, "True or False, got 0")],
    "shape_factor": [("moonlight", ValueError, "'jordan', 'spectral_norm', 'none', got")],
    "radius": [
        ("end", ValueError, "'now', 'start', got 'end'"),
        (0.0, ValueError, "(0, inf), got 0.0"),
        (None, TypeError, "(0, inf), got None"),
    ],
    "adaptive": [(1, TypeError, "True or False, got 1")],
    "preconditioning": [("power", ValueError, "'frobenius', 'spectral', 'aol', 'schatten', got")],
    "nesterov": [(1, TypeError, "True or False, got 1")],
    "trust_coefficient": [(0.0, ValueError, "(0, inf), got 0.0")],
    "weight_decay_mask": [
        (False, TypeError, "~matching_kinds('bias'"),
        (True, TypeError, "~matching_kinds('bias'"),
        ("bias", TypeError, "'bias'"),
    ],
    "trust_ratio_mask": [(False, TypeError, "~matching_kinds('bias'")],
    "param_norm_bounds": [
        (10.0, TypeError, "(low, high)"),
        ((1.0, 0.5), ValueError, "low <= high, got (1.0, 0.5)"),
        ((-1.0, None), ValueError, "[0, inf), got -1.0"),
    ],
    "trust_ratio_bounds": [((0.0, 1.0, 2.0), TypeError, "(low, high)")],
    "trust_ratio_eps": [(-1.0, ValueError, "[0, inf), got -1.0")],
    "bias_correction": [("maybe", ValueError, "'full', 'none'"), (True, ValueError, "got True")],
    "grad_averaging": [("yes", TypeError, "True or False, got 'yes'")],
    "max_grad_norm": [(0.0, ValueError, "(0, inf), got 0.0")],
    "clip_gradient": [(-1.0, ValueError, "(0, inf), got -1.0")],
    "normalization_eps": [(-1.0, ValueError, "[0, inf), got -1.0")],
    "order": [("both", ValueError, "'simultaneous', 'sequential', got 'both'")],
    "denominator": [("sum", ValueError, "'paper', 'update', 'squares', got 'sum'")],
    "ns_coeffs": [("jordan", ValueError, "'standard', 'dion'"), ((1, 2), ValueError, "(1, 2)")],
    "ns_steps": [(0, ValueError, ">= 1, got 0"), (2.0, TypeError, "2.0")],
    "ns_dtype": [("int32", ValueError, "'int32'")],
    "beta": [(1.0, ValueError, "[0, 1), got 1.0")],
    "consistent_rms": [(0.0, ValueError, "(0, inf), got 0.0")],
    "trust_ratio": [("no", TypeError, "True or False, got 'no'")],
    "others": [(0.1, TypeError, "such as lamb(1e-3)")],
    "matrix_mask": [(True, TypeError, "got True")],
    "matrix_axes": [(3, TypeError, "pairs (rows, columns)")],
    "zero_ratio": [(0, ValueError, "'one', 'coefficient'")],
    "learning_rate_in_momentum": [("no", TypeError, "True or False, got 'no'")],
    "clip": [("no", TypeError, "True or False, got 'no'")],
    "groups": [({"params": RULE}, TypeError, "param_groups(...)")],
    "mu_dtype": [("int32", ValueError, "'int32'"), (3, TypeError, "3")],
    "nu_dtype": [("int8", ValueError, "'int8'")],
    "accumulator_dtype": [("int32", ValueError, "'int32'")],
    "batch_scale": [
        (0, ValueError, ">= 1, got 0"),
        (2.0, TypeError, "2.0"),
        (jnp.asarray(2), TypeError, "static_args"),
    ],
    "warmup_strategy": [("cubic", ValueError, "'lars', got 'cubic'")],
    "warmup_epochs": [(-1, ValueError, "[0, inf), got -1")],
    "updates_per_epoch": [(0, ValueError, "(0, inf), got 0")],
    "begin_epoch": [(-1, ValueError, "[0, inf), got -1")],
    "stacked": [(0, TypeError, "stacked_layers(")],
    "target_rms": [(0.0, ValueError, "(0, 10], got 0.0"), (11, ValueError, "(0, 10], got 11")],
    "scale_speed": [(-1.0, ValueError, "[0, inf), got -1.0")],
    "rms_eps": [(0.0, ValueError, "(0, inf), got 0.0")],
    "param_max": [(0.0, ValueError, "(0, inf), got 0.0"), (None, TypeError, "None")],
    "clipping_scale": [(0.0, ValueError, "(0, inf), got 0.0"), ("no", TypeError, "'no'")],
    "scalar_lr_scale": [(-0.1, ValueError, "[0, inf), got -0.1")],
    "param_min_rms": [
        (0.0, ValueError, "(0, inf), got 0.0"),
        (5.0, ValueError, "at most param_max_rms, got 5.0"),
    ],
    "param_max_rms": [(-1.0, ValueError, "(0, inf), got -1.0")],
    "scalar_max": [(0.0, ValueError, "(0, inf), got 0.0")],
    "size_update_period": [(0, ValueError, ">= 1, got 0"), (4.0, TypeError, "4.0")],
    "clipping_update_period": [(0, ValueError, ">= 1, got 0")],
    "size_lr_scale": [(-0.1, ValueError, "[0, inf), got -0.1")],
    "meta_lr_scale": [(-1.0, ValueError, "[0, inf), got -1.0")],
    "lr_est_period": [(0, ValueError, ">= 1, got 0"), (jnp.asarray(9), TypeError, "static_args")],
    "max_step_scale": [(0.0, ValueError, "(0, inf), got 0.0")],
    "max_fullcov_size": [(-1, ValueError, ">= 0, got -1"), (9.5, TypeError, "9.5")],
}

# Where an argument of one optimizer has a range of its own.
WRONG_OF = {
    ("eve", "weight_decay"): [
        (-1e-4, ValueError, "[0, 0.1], got -0.0001"),
        (0.2, ValueError, "[0, 0.1], got 0.2"),
        ("mild", TypeError, "'mild'"),
    ],
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_argument_is_tested(name):
    assert set(OPTIMIZERS[name].arguments) <= set(WRONG)


@pytest.mark.parametrize(
    ("name", "argument", "value", "error", "says"),
    [
        pytest.param(name, argument, *wrong, id=f"{name}-{argument}-{wrong[0]!r}")
        for name in OPTIMIZERS
        for argument in OPTIMIZERS[name].arguments
        for wrong in WRONG_OF.get((name, argument), WRONG.get(argument, []))
    ],
)
def test_wrong_argument(name, argument, value, error, says):
    with pytest.raises(error) as raised:
        OPTIMIZERS[name].make(**{argument: value})
    assert argument in str(raised.value)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if "weight_decay_mask" in OPTIMIZERS[name].arguments]
)
def test_the_keyword_mask_of_optax(name):
    says = rf"{name}\(\) has no argument 'mask'; here it is called 'weight_decay_mask': .*True"
    with pytest.raises(TypeError, match=says):
        OPTIMIZERS[name].make(mask={"dense": True})


@pytest.mark.parametrize("name", [name for name, entry in OPTIMIZERS.items() if entry.keeps_norms])
def test_a_decay_of_what_keeps_its_norm(name):
    says = rf"{name}\(\) has no argument 'weight_decay', got 0.1\. .*it would do nothing"
    with pytest.raises(TypeError, match=says):
        OPTIMIZERS[name].make(weight_decay=0.1)
    groups = lb.param_groups({"params": RULE, "weight_decay": 0.1})
    with pytest.raises(ValueError, match="sets 'weight_decay', which this optimizer does not have"):
        OPTIMIZERS[name].make(groups=groups)


PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}


def start(name, **changes):
    optimizer = OPTIMIZERS[name].make(**changes)
    return optimizer, optimizer.init(PARAMS)


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestWrongTrees:
    def test_no_params_at_update(self, name):
        optimizer, state = start(name, **({"batch_scale": 1} if name == "lbsgd" else {}))
        with pytest.raises(ValueError, match=r"params must be given .* got None"):
            optimizer.update(PARAMS, state)

    def test_no_params_at_init(self, name):
        with pytest.raises(ValueError, match=r"params must be a tree of arrays, got None"):
            OPTIMIZERS[name].make().init(None)

    @pytest.mark.parametrize("empty", [{}, [], {"dense": {}}])
    def test_empty_tree(self, name, empty):
        with pytest.raises(ValueError, match=r"params must hold at least one array"):
            OPTIMIZERS[name].make().init(empty)

    @pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
    def test_leaf_that_is_no_float(self, name, dtype):
        params = {"dense": {"kernel": jnp.ones((2, 3)), "steps": jnp.ones(3, dtype)}}
        with pytest.raises(TypeError, match=rf"'dense/steps' has dtype {dtype}"):
            OPTIMIZERS[name].make().init(params)

    def test_leaf_that_is_no_array(self, name):
        with pytest.raises(TypeError, match=r"'activation' has a leaf of type"):
            OPTIMIZERS[name].make().init({"kernel": jnp.ones(2), "activation": jax.nn.relu})

    def test_integer_gradient(self, name):
        optimizer, state = start(name)
        gradients = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3, "int32")}}
        with pytest.raises(TypeError, match=r"updates must hold .*'dense/bias' has dtype int32"):
            optimizer.update(gradients, state, PARAMS)

    def test_gradient_of_another_structure(self, name):
        optimizer, state = start(name)
        with pytest.raises(ValueError, match=r"updates must have the tree structure"):
            optimizer.update({"dense": {"kernel": jnp.ones((2, 3))}}, state, PARAMS)

    def test_gradient_of_another_shape(self, name):
        optimizer, state = start(name)
        gradients = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(3)}}
        with pytest.raises(ValueError, match=r"'dense/kernel' .* \(3, 2\) .* \(2, 3\)"):
            optimizer.update(gradients, state, PARAMS)

    def test_gradient_of_another_shape_beside_a_frozen_leaf(self, name):
        optimizer = OPTIMIZERS[name].make()
        params = {"a": None, "b": jnp.ones(2)}
        with pytest.raises(ValueError, match=r"'b' has a gradient of shape \(3,\)"):
            optimizer.update({"a": None, "b": jnp.ones(3)}, optimizer.init(params), params)

    def test_state_of_other_parameters(self, name):
        optimizer, state = start(name)
        other = {"dense": {"kernel": jnp.ones((2, 3))}}
        with pytest.raises(ValueError, match=r"must have (the tree structure|an entry for each)"):
            optimizer.update(other, state, other)

    @pytest.mark.parametrize("argument", ["weight_decay_mask", "trust_ratio_mask"])
    def test_pattern_that_matches_nothing(self, name, argument):
        if argument not in OPTIMIZERS[name].arguments:
            pytest.skip(f"it has no {argument}")
        settings = {argument: ~lb.matching("bias", "gamma")}
        if name == "lbsgd":
            settings["warmup_strategy"] = "lars"
        with pytest.raises(
            ValueError, match=rf"{argument}: .*'gamma' matches no parameter.*dense/kernel"
        ):
            start(name, **settings)

    @pytest.mark.parametrize("argument", ["weight_decay_mask", "trust_ratio_mask"])
    def test_mask_that_selects_nothing(self, name, argument):
        if argument not in OPTIMIZERS[name].arguments:
            pytest.skip(f"it has no {argument}")
        settings = {"warmup_strategy": "lars"} if name == "lbsgd" else {}
        masks = (
            lb.at_least_ndim(3),
            lb.matching("bias") & lb.at_least_ndim(2),
            lambda params: jax.tree.map(lambda leaf: False, params),
            {"dense": False},
        )
        for mask in masks:
            with pytest.raises(ValueError, match=rf"{argument}: .* selects no parameter.*False"):
                start(name, **settings | {argument: mask})
        start(name, **settings | {argument: lambda params: False})

    def test_mask_of_another_structure(self, name):
        if "weight_decay_mask" not in OPTIMIZERS[name].arguments:
            pytest.skip("it has no mask")
        with pytest.raises(ValueError, match=r"weight_decay_mask must have the tree structure"):
            start(name, weight_decay_mask={"conv": True})

    def test_mask_that_holds_arrays(self, name):
        if "weight_decay_mask" not in OPTIMIZERS[name].arguments:
            pytest.skip("it has no mask")
        mask = jax.tree.map(jnp.ones_like, PARAMS)
        with pytest.raises(TypeError, match=r"weight_decay_mask must hold Python booleans"):
            start(name, weight_decay_mask=mask)


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: lb.chain(), ValueError, "at least one transformation"),
        (lambda: lb.chain([lb.scale_by_adam()]), TypeError, "separate arguments"),
        (lambda: lb.chain(lb.lamb), TypeError, "gradient transformations"),
        (lambda: lb.sum_of(), ValueError, "at least one branch"),
        (lambda: lb.sum_of(optax.scale(1.0)), TypeError, "each branch of sum_of() must be"),
        (
            lambda: lb.scale_by_parameter_rms(2.0, max_rms=1.0),
            ValueError,
            "min_rms must be at most max_rms",
        ),
        (lambda: lb.learn_log_scale(0.1, at_bounds="go"), ValueError, "at_bounds must be one of"),
        (
            lambda: lb.nesterov_split(optax.scale(1.0)),
            TypeError,
            "inner must be one transformation",
        ),
        (
            lambda: lb.accumulate_gradients(optax.sgd, every=2),
            TypeError,
            "inner must be a gradient",
        ),
        (
            lambda: lb.accumulate_gradients(optax.sgd(1.0), every=0),
            ValueError,
            "every must be >= 1",
        ),
        (lambda: lb.accumulate_gradients(optax.sgd(1.0), every=True), TypeError, "every must be"),
        (lambda: lb.scale_by_lars(zero_ratio="formula"), ValueError, "eps=0"),
        (lambda: lb.centralize_gradients(output_axis=-2), ValueError, "output_axis must be >= -1"),
        (lambda: lb.centralize_gradients(True), TypeError, "mask must be None"),
        (
            lambda: lb.batch_scale(0, batch_size=32),
            ValueError,
            "macrobatch_size must be >= 1, got 0",
        ),
        (
            lambda: lb.batch_scale(64, batch_size=32.0),
            TypeError,
            "batch_size must be a Python integer",
        ),
        (
            lambda: lb.batch_scale(64, batch_size=32, num_workers=0),
            ValueError,
            "num_workers must be >= 1, got 0",
        ),
    ],
)
def test_wrong_composition(build, error, says):
    with pytest.raises(error) as raised:
        build()
    assert says in str(raised.value)


def test_numpy_numbers_and_integers_are_numbers():
    expected = lb.lamb(0.5, weight_decay=0.25)
    given = lb.lamb(np.float32(0.5), weight_decay=np.float64(0.25))
    for optimizer in (given, lb.lamb(jnp.asarray(0.5), weight_decay=jnp.asarray(0.25))):
        updates, _ = optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
        reference, _ = expected.update(PARAMS, expected.init(PARAMS), PARAMS)
        jax.tree.map(np.testing.assert_array_equal, updates, reference)
    optimizer = lb.lars(1, momentum=0)
    optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)


def test_python_floats_are_parameters():
    optimizer = lb.lamb(0.5)
    state = optimizer.init({"a": 2.0})
    updates, state = optimizer.update({"a": 1.0}, state, {"a": 2.0})
    np.testing.assert_allclose(updates["a"], -1.0, rtol=1e-5)
