"""Sums over tiles are those over the whole array, however it can be cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_largebatch.engine import tiles
from optax_largebatch.engine.tiles import Tiles

SHAPES = {
    "even": ((64, 32), ()),
    "some elements are left over": ((2003,), ()),
    "a stack": ((4, 16, 32), (0,)),
    "a stack of odd layers": ((3, 701), (0,)),
    "stacked twice": ((2, 3, 50, 7), (0, 1)),
    "one layer": ((1, 2048), (0,)),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "MAX_TILE_ELEMENTS", 128)


@pytest.mark.parametrize("name", SHAPES)
def test_sums_are_those_of_whole_blocks(name):
    shape, kept = SHAPES[name]
    cut = Tiles.of(shape, kept)
    assert cut is not None
    a, b = (jax.random.uniform(jax.random.key(seed), shape, "float32") for seed in range(2))
    scale = 1.0 + jnp.arange(float(np.prod(cut.shape_of_blocks))).reshape(cut.shape_of_blocks)
    one = jnp.asarray(3.0)
    seen = []

    def terms(arrays):
        a, b, scale, one = arrays
        seen.append(a.size)
        return [a * b * scale, jnp.square(a + one)]

    assert all(map(cut.can_tile, (a, b, scale, one)))
    sums = jax.jit(cut.sums, static_argnums=0)(terms, (a, b, scale, one))
    others = tuple(axis for axis in range(len(shape)) if axis not in kept)
    for ours, whole in zip(sums, terms((a, b, scale, one)), strict=True):
        expected = np.sum(whole, axis=others, keepdims=bool(kept))
        assert ours.shape == expected.shape
        np.testing.assert_allclose(ours, expected, rtol=2e-5)
    assert max(seen[:-1]) < tiles.TILES_PER_ITERATION * tiles.MAX_TILE_ELEMENTS < a.size


@pytest.mark.parametrize(
    ("shape", "kept"),
    [((64, 32), (1,)), ((200, 1600), (0,)), ((0, 5), ()), ((100,), ())],
    ids=["not contiguous", "more blocks than a tile holds", "empty", "no two turns"],
)
def test_what_is_not_cut(shape, kept):
    assert Tiles.of(shape, kept) is None


def test_arrays_that_cannot_be_cut():
    cut = Tiles.of((4, 512), (0,))
    shapes = [(4, 512), (4, 1), (), (512,), (1, 512), (512, 4)]
    assert [cut.can_tile(jnp.zeros(shape)) for shape in shapes] == [True] * 3 + [False] * 3


def test_sums_can_be_differentiated():
    """As updates are, by those who learn the parameters of an optimizer."""
    cut = Tiles.of((2003,), ())
    x = jnp.linspace(-1.0, 1.0, 2003)

    def weighted(x):
        first, second = cut.sums(lambda arrays: [arrays[0] ** 3, arrays[0] ** 2], (x,))
        return first + 2 * second

    np.testing.assert_allclose(jax.grad(weighted)(x), 3 * x**2 + 4 * x, rtol=1e-5, atol=1e-6)
