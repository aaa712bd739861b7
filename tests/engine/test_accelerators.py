"""What GPUs, TPUs and meshes compute, run on a CPU; their programs are chosen when they lower."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.engine.compilation import chunked
from optax_largebatch.engine.execution_plans import ONE_GPU, ONE_TPU, SEVERAL_DEVICES
from optax_largebatch.engine.identical_leaves import even_chunks, group_leaves
from optax_largebatch.engine.requests import Statistic
from optax_largebatch.engine.sums import variadic
from tests.engine.steps import lowered, use_plan

ACCELERATORS = {"several devices": SEVERAL_DEVICES, "one GPU": ONE_GPU, "one TPU": ONE_TPU}


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
    assert [len(x) for x in chunked(range(65))] == [32, 32, 1]


def test_batches_are_of_one_size_if_that_costs_few():
    assert [len(x) for x in even_chunks(range(50), 12)] == [10] * 5
    assert [len(x) for x in even_chunks(range(14), 12)] == [7, 7]
    assert [len(x) for x in even_chunks(range(56), 10)] == [8] * 7
    assert [len(x) for x in even_chunks(range(13), 12)] == [6, 7]
    assert even_chunks([5, 7, 8], 1) == [[5], [7], [8]]


@pytest.mark.parametrize(
    ("platform", "kernels"), [("cuda", {"12x8", "524288"}), ("tpu", {"8", "524288"}), ("cpu", None)]
)
def test_a_gpu_takes_the_sums_of_small_identical_leaves_side_by_side(platform, kernels):
    """Or a thousand leaves are a thousand kernels, each of which takes longer to start than to run.

    Larger leaves are taken one by one, identical or not.
    """
    params = [jax.ShapeDtypeStruct(shape, "float32") for shape in 24 * [(8,)] + 2 * [(2**19,)]]
    (text,) = lowered(lb.lamb(1e-3, weight_decay=0.01), params, platform)
    reduced = {*re.findall(r"stablehlo.reduce\(.*?\(tensor<(\w+)xf32>", text)}
    if platform == "cpu":
        assert reduced  # however a CPU does it, not side by side
        assert "12x8" not in reduced
    else:
        assert reduced == kernels


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


@pytest.mark.parametrize("name", ACCELERATORS)
def test_numbers_of_identical_leaves_are_vectors(name, monkeypatch):
    """Or XLA on a GPU compiles a dozen operations on single numbers into each leaf's kernels.

    And it takes a kernel for each new number of the state, and one more to copy the old number.
    """
    use_plan(monkeypatch, ACCELERATORS[name])
    params = [jnp.ones(10)] * 4
    (ratios,) = lowered(lb.lans(1e-3, weight_decay=0.01), params, "cpu")
    of_numbers = len(re.findall(r"stablehlo.sqrt .* tensor<f32>", ratios))
    of_vectors = len(re.findall(r"stablehlo.sqrt .* tensor<\dxf32>", ratios))
    (new_numbers,) = lowered(lb.scaled_adam(1e-3), params, "cpu")
    as_vectors = name != "one TPU"
    assert (of_vectors > 0) == as_vectors
    assert (of_numbers == 0) == as_vectors
    assert ("dynamic_slice" in new_numbers) == as_vectors


def test_a_large_leaf_waits_for_the_state_of_the_one_before_it():
    """Or XLA takes the sums of all leaves before it finishes the first.

    The scalars wait too. Kernels that read the same ones would all be compared with each other.
    """
    optimizer = lb.lars(optax.linear_schedule(1e-3, 0.0, 10))
    params = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 2
    for text, waiting in zip(
        lowered(optimizer, params, "cuda", "tpu", "cpu"), (1, 1, 0), strict=True
    ):
        barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
        of_leaves = [line for line in barriers if line.count("1024x1024xf32") == 2]
        assert len(of_leaves) == waiting
        assert all("tensor<f32>" in line for line in of_leaves)
