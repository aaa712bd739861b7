"""Every wrong argument and every wrong tree: what was wrong, and what is allowed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from tests.helpers import first_step
from tests.optimizers.registry import OPTIMIZERS

RULE = lb.matching("kernel")

# One of each kind of argument; `tests/test_public_arguments.py` has them all.
WRONG = [
    (lb.lamb, "learning_rate", -0.1, ValueError, "[0, inf), got -0.1"),
    (lb.lamb, "learning_rate", "0.1", TypeError, "or a schedule"),
    (lb.lamb, "learning_rate", jnp.ones(3), ValueError, "scalar, got an array of shape (3,)"),
    (lb.lamb, "eps", [], TypeError, "[0, inf), got [] of type list"),
    (lb.lamb, "bias_correction", True, ValueError, "'full', 'none', 'step_size', got True"),
    (lb.lamb, "grad_averaging", "yes", TypeError, "True or False, got 'yes'"),
    (lb.lamb, "weight_decay_mask", False, TypeError, "a rule such as ~matching_kinds('bias'"),
    (lb.lamb, "param_norm_bounds", 10.0, TypeError, "a pair (low, high), either end None"),
    (lb.lamb, "param_norm_bounds", (1.0, 0.5), ValueError, "low <= high, got (1.0, 0.5)"),
    (lb.lamb, "mu_dtype", "int32", ValueError, "floating dtype, got 'int32'"),
    (lb.lamb, "groups", {"params": RULE}, TypeError, "what param_groups(...) returns"),
    (lb.lamb, "stacked", 0, TypeError, "what stacked_layers(...) returns"),
    (lb.lbsgd, "batch_scale", 0, ValueError, ">= 1, got 0"),
    (lb.lbsgd, "batch_scale", jnp.asarray(2), TypeError, "static_args=('batch_scale',)"),
    (lb.scaled_adam, "param_min_rms", 5.0, ValueError, "low <= high, got (5.0, 3.0)"),
    (lb.muon, "ns_coeffs", (1, 2), ValueError, "three numbers for all iterations"),
    (lb.muon, "matrix_axes", 3, TypeError, "pairs (rows, columns) of axes"),
    (lb.muon, "others", "adam", TypeError, "others, if it is no optimizer, must be a number"),
    (lb.muonh, "radius", "end", ValueError, "'now', 'start', got 'end'"),
]


@pytest.mark.parametrize(("optimizer", "argument", "value", "error", "says"), WRONG)
def test_what_is_allowed_is_said(optimizer, argument, value, error, says):
    with pytest.raises(error) as raised:
        optimizer(**{"learning_rate": 0.1, argument: value})
    assert str(raised.value).startswith(argument)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if "weight_decay_mask" in OPTIMIZERS[name].arguments]
)
def test_the_keyword_mask_of_optax(name):
    says = rf"{name}\(\) has no argument 'mask', .*Here it is called 'weight_decay_mask'"
    with pytest.raises(TypeError, match=says):
        OPTIMIZERS[name].make(mask={"dense": True})


@pytest.mark.parametrize("name", [name for name, entry in OPTIMIZERS.items() if entry.keeps_norms])
def test_a_decay_of_what_keeps_its_norm(name):
    says = rf"{name}\(\) has no argument 'weight_decay', got 0.1\. .*it would do nothing"
    with pytest.raises(TypeError, match=says):
        OPTIMIZERS[name].make(weight_decay=0.1)


@pytest.mark.parametrize(
    "name", [name for name, entry in OPTIMIZERS.items() if "weight_decay" not in entry.arguments]
)
def test_groups_that_decay_where_nothing_does(name):
    groups = lb.param_groups({"params": RULE, "weight_decay": 0.1})
    with pytest.raises(ValueError, match="sets 'weight_decay', which this optimizer does not have"):
        OPTIMIZERS[name].make(groups=groups)


PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}


def start(name, **changes):
    optimizer = OPTIMIZERS[name].make(**changes)
    return optimizer, optimizer.init(PARAMS)


KERNEL = jnp.ones((2, 3))
WRONG_PARAMS = [
    (None, ValueError, r"params must be a tree of arrays, got None"),
    *((empty, ValueError, r"params must hold at least one array") for empty in ({}, [], {"a": {}})),
    *(
        (
            {"a": {"b": KERNEL, "steps": jnp.ones(3, dtype)}},
            TypeError,
            f"'a/steps' has dtype {dtype}",
        )
        for dtype in ("int32", "bool")
    ),
    ({"a": KERNEL, "f": jax.nn.relu}, TypeError, r"'f' has a leaf of type.*eqx\.filter\(model, "),
]
WRONG_GRADIENTS = [
    ({"kernel": KERNEL, "bias": jnp.ones(3, "int32")}, TypeError,
     r"updates must hold .*'dense/bias' has dtype int32"),
    ({"kernel": KERNEL}, ValueError, r"updates must have the tree structure"),
    ({"kernel": KERNEL.T, "bias": jnp.ones(3)}, ValueError,
     r"'dense/kernel' .* \(3, 2\) .* \(2, 3\)"),
]  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestWrongTrees:
    def test_no_params_at_update(self, name):
        optimizer, state = start(name, **({"batch_scale": 1} if name == "lbsgd" else {}))
        with pytest.raises(ValueError, match=r"params must be given .* got None"):
            optimizer.update(PARAMS, state)

    @pytest.mark.parametrize(("params", "error", "says"), WRONG_PARAMS)
    def test_wrong_params_at_init(self, name, params, error, says):
        with pytest.raises(error, match=says):
            OPTIMIZERS[name].make().init(params)

    @pytest.mark.parametrize(("gradients", "error", "says"), WRONG_GRADIENTS)
    def test_wrong_gradients(self, name, gradients, error, says):
        optimizer, state = start(name)
        with pytest.raises(error, match=says):
            optimizer.update({"dense": gradients}, state, PARAMS)

    def test_gradient_of_another_shape_beside_a_frozen_leaf(self, name):
        optimizer = OPTIMIZERS[name].make()
        params = {"a": None, "b": jnp.ones((2, 2))}
        with pytest.raises(ValueError, match=r"'b' has a gradient of shape \(3, 2\)"):
            first_step(optimizer, {"a": None, "b": jnp.ones((3, 2))}, params)

    def test_state_of_other_parameters(self, name):
        optimizer, state = start(name)
        other = {"dense": {"kernel": jnp.ones((2, 3))}}
        with pytest.raises(ValueError, match=r"must have (the tree structure|an entry for each)"):
            optimizer.update(other, state, other)

    @pytest.mark.parametrize("argument", ["weight_decay_mask", "trust_ratio_mask"])
    def test_masks_that_select_nothing(self, name, argument):
        if argument not in OPTIMIZERS[name].arguments:
            pytest.skip(f"it has no {argument}")
        settings = {"warmup_strategy": "lars"} if name == "lbsgd" else {}
        says = rf"{argument}: .*'gamma' matches no parameter.*dense/kernel"
        with pytest.raises(ValueError, match=says):
            start(name, **settings | {argument: ~lb.matching("bias", "gamma")})
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

    def test_masks_of_another_structure_or_of_arrays(self, name):
        if "weight_decay_mask" not in OPTIMIZERS[name].arguments:
            pytest.skip("it has no mask")
        with pytest.raises(ValueError, match=r"weight_decay_mask must have the tree structure"):
            start(name, weight_decay_mask={"conv": True})
        with pytest.raises(TypeError, match=r"weight_decay_mask must hold Python booleans"):
            start(name, weight_decay_mask=jax.tree.map(jnp.ones_like, PARAMS))


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: lb.chain(), ValueError, "at least one transformation"),
        (lambda: lb.chain([lb.scale_by_adam()]), TypeError, "separate arguments"),
        (lambda: lb.sum_of(), ValueError, "at least one branch"),
        (lambda: lb.sum_of(optax.scale(1.0)), TypeError, "each branch of sum_of() must be"),
        (lambda: lb.nesterov_split(optax.scale(1.0)), TypeError, "inner must be one transformat"),
        (lambda: lb.scale_by_lars(zero_ratio="formula"), ValueError, "eps=0"),
        (lambda: lb.centralize_gradients(True), TypeError, "mask must be None"),
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
        updates, _ = first_step(optimizer, PARAMS, PARAMS)
        reference, _ = first_step(expected, PARAMS, PARAMS)
        jax.tree.map(np.testing.assert_array_equal, updates, reference)
    optimizer = lb.lars(1, momentum=0)
    first_step(optimizer, PARAMS, PARAMS)


def test_python_floats_are_parameters():
    optimizer = lb.lamb(0.5)
    state = optimizer.init({"a": 2.0})
    updates, state = optimizer.update({"a": 1.0}, state, {"a": 2.0})
    np.testing.assert_allclose(updates["a"], -1.0, rtol=1e-5)
