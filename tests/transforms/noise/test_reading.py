"""What `noise_scale` reads: the ratio of the averages and its band."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import pytest

import optax_largebatch as lb
from tests.transforms.noise.quadratic import many_runs, skewed


@pytest.mark.parametrize("confidence", [0.6, 0.9])
def test_the_band_holds_the_truth_as_often_as_it_says(confidence):
    band = jax.vmap(functools.partial(lb.noise_scale, confidence=confidence))(many_runs(100))
    covered = np.mean((band.low < 4) & (band.high > 4))
    assert abs(covered - confidence) < 0.05


SETTINGS = [(0.9, 100), (0.99, 5), (0.99, 10), (0.99, 100), (0.99, 800), (0.999, 800)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "steps", "noise", "draw"),
    [
        *[(*own, 4.0, draw) for own in SETTINGS for draw in (jax.random.normal, skewed)],
        *[(*own, 40.0, jax.random.normal) for own in ((0.95, 100), (0.99, 800), (0.999, 800))],
    ],
)
def test_the_band_is_as_good_as_the_documentation_says(decay, steps, noise, draw):
    """90 of 100 within 3, of 4000 runs: few effective steps or many, skewed or mostly noise."""
    band = jax.vmap(lb.noise_scale)(many_runs(steps, 4000, decay, noise, draw))
    covered = np.mean((band.low < noise) & (band.high > noise))
    assert abs(covered - 0.9) < 0.03


class TestBand:
    def state(self, **changes):
        """After a hundred equal weights: 4 +- 0.5 and 1 +- 0.1, the steps ten times as far."""
        numbers = {
            "weight": 100.0,
            "square_weight": 100.0,
            "noise": 4.0,
            "signal": 1.0,
            "noise_variance": 99 * 0.5**2,
            "signal_variance": 99 * 0.1**2,
            "covariance": 0.0,
        } | changes
        arrays = {
            name: jnp.asarray(x, "float32") if "weight" in name else jnp.full(2, x, "float32")
            for name, x in numbers.items()
        }
        return lb.states.MeasureNoiseScaleState(**arrays)

    def test_is_fiellers(self):
        """At its ends the distance from 0 of `noise - r signal` is t of its standard deviations."""
        band = lb.noise_scale(self.state(covariance=99 * 0.02), confidence=0.9)
        for end in (band.low, band.high):
            variance = 0.5**2 - 2 * end * 0.02 + (end * 0.1) ** 2
            assert_allclose((4 - end) ** 2 / variance, 1.6604**2, rtol=1e-3)
        assert band.low < 4 < band.high

    def test_keeps_its_dtype(self, both_precisions):
        assert {x.dtype.name for x in jax.tree.leaves(lb.noise_scale(self.state()))} == {"float32"}

    def test_is_open_above_where_the_gradient_is_not_told_from_0(self):
        band = lb.noise_scale(self.state(signal=0.1))
        assert_allclose(band.noise_scale, 40)
        assert 0 < band.low < 40
        assert band.high == jnp.inf

    def test_a_gradient_estimated_below_0(self):
        band = lb.noise_scale(self.state(signal=-0.05))
        assert band.noise_scale == band.high == jnp.inf
        assert 0 < band.low < jnp.inf

    def test_begins_at_0_where_the_noise_is_not_told_from_0(self):
        band = lb.noise_scale(self.state(noise=0.5))
        assert band.low == 0
        assert_allclose(band.noise_scale, 0.5)
        assert 0.5 < band.high < jnp.inf

    @pytest.mark.parametrize("scale", [1e-15, 1e15])
    def test_neither_overflows_nor_vanishes(self, scale):
        band, expected = (
            lb.noise_scale(
                self.state(
                    noise=4 * scale,
                    signal=scale,
                    noise_variance=99 * (0.5 * scale) ** 2,
                    signal_variance=99 * (0.1 * scale) ** 2,
                )
            )
            for scale in (scale, 1.0)
        )
        assert_allclose(band[:3], expected[:3], rtol=1e-4)

    def test_is_unknown_before_the_first_step_and_without_bounds_after_one(self):
        transform = lb.measure_noise_scale()
        own = jnp.array([[1.0, 2.0], [3.0, 1.0]])
        state = transform.init(own[0])
        assert np.all(np.isnan(jax.tree.leaves(lb.noise_scale(state))))
        parts = lb.small_batches_of_examples(own, own[0], mean=own.mean(0))
        _, state = transform.update(own.mean(0), state, small_batches=parts)
        band = lb.noise_scale(state)
        assert np.isfinite(band.noise_scale)
        assert (band.low, band.high) == (0, jnp.inf)
