"""What GPUs, TPUs and meshes compute, run on a CPU; their programs are chosen when they lower."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.engine import compilation, execution_plans, identical_leaves, step
from optax_largebatch.engine.compilation import chunked
from optax_largebatch.engine.execution_plans import ONE_GPU, ONE_TPU, SEVERAL_DEVICES
from optax_largebatch.engine.identical_leaves import even_chunks, group_leaves
from optax_largebatch.engine.requests import Statistic
from optax_largebatch.engine.sums import variadic
from optax_largebatch.testing import reference
from tests.conftest import enable_x64
from tests.engine.steps import lowered, some_steps, use_plan

CHUNK, GROUP = 4, 2**10
BATCH = 3  # of leaves that LAMB and LANS pass over, which have four arrays
PLANS = {"several devices": SEVERAL_DEVICES, "one GPU": ONE_GPU, "one TPU": ONE_TPU}


@pytest.fixture(autouse=True)
def thresholds(monkeypatch):
    """Lower, so that a few small leaves lie on both sides of each."""
    monkeypatch.setattr(compilation, "MAX_CHUNK", CHUNK)
    monkeypatch.setattr(identical_leaves, "MAX_BATCHED_LEAF", GROUP)
    monkeypatch.setattr(identical_leaves, "MAX_KERNEL_ARRAYS", 7 * BATCH)
    monkeypatch.setattr(identical_leaves, "MAX_BATCH", 2 * GROUP)
    few = {platform: smaller(plan) for platform, plan in execution_plans.ON_ONE_DEVICE.items()}
    monkeypatch.setattr(step, "ON_ONE_DEVICE", few)


def smaller(plan):
    """The plan with groups that are as many times smaller as the leaves here."""
    size = plan.group_size
    return dataclasses.replace(plan, group_size=size and size * GROUP // 2**18)


@pytest.fixture(params=PLANS)
def plan(request, monkeypatch):
    use_plan(monkeypatch, smaller(PLANS[request.param]))
    return request.param


def network(dtype):
    """More identical leaves than a chunk has, others, and leaves around the size of a group.

    No two have the same numbers, so that none can be taken for another.
    """
    shapes = {f"bias_{index}": (3 + index % 2,) for index in range(2 * CHUNK + 4)}
    shapes |= {f"large_{n}": (GROUP + n,) for n in (-1, 0, 1)}
    # Two of these are a group on one GPU.
    shapes |= {f"identical_{index}": (2, GROUP // 2 + 1) for index in range(3)}
    shapes |= {"stack": (3, 16, 12), "stack_of_few": (3, 5), "stack_of_more": (3, 5)}
    return {
        key: jnp.cos(k + jnp.arange(np.prod(shape), dtype=dtype)).reshape(shape) + 0.5
        for k, (key, shape) in enumerate(shapes.items())
    }


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-6), pytest.param("float64", 1e-13, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", ["lamb", "lans", "lars", "adamh"])
def test_the_numbers_of_the_reference_executor(name, dtype, tolerance):
    with enable_x64(dtype == "float64"):
        optimizer = stacked_optimizer(name)
        found = two_steps(optimizer, optimizer.update, dtype)
        for own, wanted in zip(found, of_the_reference_executor(name, dtype), strict=True):
            jax.tree.map(lambda x, y: close(x, y, tolerance), own, wanted)


def stacked_optimizer(name):
    settings = {} if name == "adamh" else {"weight_decay": 0.01}
    settings |= {"max_grad_norm": 1.0} if name == "lamb" else {}
    return getattr(lb, name)(0.1, stacked=lb.stacked_layers({"^stack": 0}), **settings)


def two_steps(optimizer, update, dtype):
    params = network(dtype)
    waves = lambda index: jax.tree.map(lambda x: jnp.sin(3 * x + index) + 0.1, params)  # noqa: E731
    return some_steps(optimizer, update, params, waves, 2)


@functools.cache
def of_the_reference_executor(name, dtype):
    """Compiled once for all plans, of which it knows nothing."""
    optimizer = stacked_optimizer(name)
    return [*two_steps(optimizer, reference(optimizer).update, dtype)]


def close(found, expected, tolerance):
    """Relative to the largest value of a leaf; a CPU adds a GPU's sums one after the other."""
    chex.assert_trees_all_close(
        found, expected, rtol=0, atol=tolerance * max(float(jnp.max(jnp.abs(expected))), 1e-30)
    )


@pytest.mark.parametrize("kept", [(), (0,), (1,)])
def test_several_sums_in_one_reduction(kept):
    arrays = [jnp.arange(24.0).reshape(2, 3, 4) + k for k in range(3)]
    kinds = ("norm", "sum", "mean")
    statistics = [Statistic(x, kind, kept) for x, kind in zip(arrays, kinds, strict=True)]
    program = jax.make_jaxpr(lambda: variadic(statistics))()
    assert [x.primitive.name for x in program.eqns].count("reduce") == 1
    others = tuple(axis for axis in range(3) if axis not in kept)
    for x, kind, found in zip(arrays, kinds, variadic(statistics), strict=True):
        terms = x**2 if kind == "norm" else x
        np.testing.assert_allclose(
            found, np.sum(terms, axis=others, keepdims=bool(kept)), rtol=1e-6
        )


def test_a_gpu_takes_small_leaves_first():
    assert ONE_GPU.smallest_first
    assert not ONE_TPU.smallest_first
    assert group_leaves({0: 3, 1: 3, 2: 3}, 6) == [[0, 1], [2]]
    assert group_leaves({0: 3, 1: 3, 2: 3}, None) == [[0, 1, 2]]
    assert [len(x) for x in chunked(range(2 * CHUNK + 1))] == [CHUNK, CHUNK, 1]


def test_batches_are_of_one_size_if_that_costs_few():
    assert [len(x) for x in even_chunks(range(50), 12)] == [10] * 5
    assert [len(x) for x in even_chunks(range(14), 12)] == [7, 7]
    assert [len(x) for x in even_chunks(range(56), 10)] == [8] * 7
    assert [len(x) for x in even_chunks(range(13), 12)] == [6, 7]
    assert even_chunks([5, 7, 8], 1) == [[5], [7], [8]]


@pytest.mark.parametrize(
    ("platform", "kernel_shape"), [("cuda", (BATCH, 8)), ("tpu", (8,)), ("cpu", None)]
)
def test_a_gpu_takes_the_sums_of_small_identical_leaves_side_by_side(platform, kernel_shape):
    """Or a thousand leaves are a thousand kernels, each of which takes longer to start than to run.

    Larger leaves are taken one by one, identical or not.
    """
    optimizer = lb.lamb(1e-3, weight_decay=0.01)
    shapes = {f"bias_{k}": (8,) for k in range(2 * BATCH)}
    shapes |= {f"large_{k}": (2 * GROUP,) for k in range(2)}
    params = {key: jax.ShapeDtypeStruct(shape, "float32") for key, shape in shapes.items()}
    (text,) = lowered(optimizer, params, platform)
    reduced = re.findall(r"stablehlo.reduce\(.*?\(tensor<(\w+)xf32>", text)
    if kernel_shape is None:
        assert reduced  # however a CPU does it, not side by side
        assert f"{BATCH}x8" not in reduced
    else:
        assert set(reduced) == {"x".join(map(str, kernel_shape)), str(2 * GROUP)}


def test_lans_writes_its_moments_in_the_last_pass_on_a_tpu():
    """Two sums are taken of the second moment. On a GPU one reduction takes both."""
    optimizer = lb.lans(1e-3)
    params = {"kernel": jax.ShapeDtypeStruct((512, 512), "float32")}
    for text, written in zip(
        lowered(optimizer, params, "cuda", "tpu", "cpu"), (2, 0, 2), strict=True
    ):
        heads = [x for x in text.splitlines() if "func.func private @stored_and_sums" in x]
        assert max(head.split("->")[1].count("512x512") for head in heads) == written


def test_results_of_matrices_are_read_and_not_computed_again():
    """Only what is computed again needs a barrier in the last pass; this would keep more."""

    def barriers(optimizer):
        params = {"kernel": jax.ShapeDtypeStruct((512, 512), "float32")}
        return lowered(optimizer, params, "cuda")[0].count("optimization_barrier")

    assert barriers(lb.muonh(1e-3)) == barriers(lb.muon(1e-3))


@pytest.mark.parametrize("plan", PLANS, indirect=True)
def test_numbers_of_identical_leaves_are_vectors(plan):
    """Or XLA on a GPU compiles a dozen operations on single numbers into each leaf's kernels.

    And it takes a kernel for each new number of the state, and one more to copy the old number.
    """
    params = {f"bias_{index}": jnp.ones(10) for index in range(CHUNK)}
    (ratios,) = lowered(lb.lans(1e-3, weight_decay=0.01), params, "cpu")
    of_numbers = len(re.findall(r"stablehlo.sqrt .* tensor<f32>", ratios))
    of_vectors = len(re.findall(r"stablehlo.sqrt .* tensor<\dxf32>", ratios))
    (new_numbers,) = lowered(lb.scaled_adam(1e-3), params, "cpu")
    as_vectors = plan != "one TPU"
    assert (of_vectors > 0) == as_vectors
    assert (of_numbers == 0) == as_vectors
    assert ("dynamic_slice" in new_numbers) == as_vectors


def test_a_large_leaf_waits_for_the_state_of_the_one_before_it():
    """Or XLA takes the sums of all leaves before it finishes the first.

    The scalars wait too. Kernels that read the same ones would all be compared with each other.
    """
    optimizer = lb.lars(optax.linear_schedule(1e-3, 0.0, 10))
    params = {name: jax.ShapeDtypeStruct((64, 64), "float32") for name in ("first", "second")}
    for text, waiting in zip(
        lowered(optimizer, params, "cuda", "tpu", "cpu"), (1, 1, 0), strict=True
    ):
        barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
        of_leaves = [line for line in barriers if line.count("64x64xf32") == 2]
        assert len(of_leaves) == waiting
        assert all("tensor<f32>" in line for line in of_leaves)
