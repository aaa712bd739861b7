"""Plots: what is drawn where. That they look well, only eyes can say."""

import subprocess
import sys

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import optax_largebatch as lb
from optax_largebatch import plots


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def drawn(ax):
    """A figure that is drawn: what the layout cannot place warns, and warnings are errors."""
    ax.figure.canvas.draw()
    return ax


HISTORY = {
    "embedding": np.array([8.0, 16.0, np.nan]),
    "layers/kernel": np.array([[4.0, 2.0], [4.0, 1.0], [4.0, 0.0]]),
    "layers/bias": np.ones(3),
}


def test_trust_ratios_have_a_row_for_each_layer():
    ax = drawn(plots.trust_ratios(HISTORY, steps=[10, 20, 40]))
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["embedding", "layers/kernel[0]", "layers/kernel[1]", "layers/bias"]
    ratios, ones = ax.collections
    expected = [[8, 16, -1], [4, 4, 4], [2, 1, -1], [1, 1, 1]]  # -1: black
    assert_array_equal(np.ma.filled(ratios.get_array(), -1), expected)
    assert_array_equal(np.ma.getmaskarray(ones.get_array()), np.array(expected) != 1)
    # The colour in the middle is the median of those that are adapted: 16, 8, 4, 4, 4, 2.
    assert_allclose(np.sqrt(ratios.norm.vmin * ratios.norm.vmax), 4)
    assert ratios.norm.vmin < 2
    assert 16 < ratios.norm.vmax < 20
    assert ax.get_xlim() == (5, 50)
    assert ax.get_ylim() == (3.5, -0.5)  # the first layer at the top


def test_colours_reach_a_factor_of_100_and_none_where_nothing_is_adapted():
    ax = plots.trust_ratios({"a": np.array([1e-9, 2.0, 2.0, 2.0, 1e9])})
    norm = ax.collections[0].norm
    assert_allclose((norm.vmin, norm.vmax), (0.02, 200))
    ax = drawn(plots.trust_ratios({"a": np.ones(2)}))
    assert not np.ma.getmaskarray(ax.collections[1].get_array()).any()  # all is grey


def test_long_names_and_many_layers():
    long = "/".join(["module"] * 20)
    history = {f"{index}/{long}/{index}": np.array([2.0]) for index in range(200)}
    ax = drawn(plots.trust_ratios(history))
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert len(names) == 67
    assert max(map(len, names)) <= plots.LONGEST_NAME
    assert names[1].startswith("3/module/module/")
    assert names[1].endswith("/module/3")


@pytest.mark.parametrize(
    ("history", "steps", "said"),
    [
        ({}, None, "history must hold arrays of one length"),
        ({"a": np.ones(2), "b": np.ones(3)}, None, r"of one length, 1 or more, got \[2, 3\]"),
        ({"a": np.ones(0)}, None, r"of one length, 1 or more, got \[0\]"),
        ({"a": 1.0}, None, "for 'a', got a single ratio"),
        ({"a": np.ones(2)}, [0], "steps must be 2 increasing numbers"),
        ({"a": np.ones(2)}, [1, 1], "steps must be 2 increasing numbers"),
    ],
)
def test_wrong_history(history, steps, said):
    with pytest.raises(ValueError, match=said):
        plots.trust_ratios(history, steps=steps)


def test_without_matplotlib():
    """The library does without it, and a plot says what to install."""
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import optax_largebatch as lb\n"
        "lb.plots.batch_plan(lb.batch_plan(8, total=100))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        "ImportError: plots are drawn with matplotlib, which is not installed: "
        "pip install matplotlib"
    )


def test_a_plan_of_the_batch():
    rate = lb.PlannedRate(1e-3, total=10_000, warmup=1000, decay="linear")
    run = lb.TunedRun("muon", batch_size=64, total=10_000, learning_rate=rate, weight_decay=0.1)
    plan = lb.batch_plan("0:64 3k:256", total=10_000, run=run)
    sizes, rates, decays, momenta = map(drawn, plots.batch_plan(plan))
    seen, batches = sizes.lines[0].get_data()
    for step in (0, 46, 47, plan.total_steps - 1):
        (place,) = np.flatnonzero(seen == plan.examples_at(step))
        assert batches[place] == plan.batch_size(step)
        for ax, schedule in (
            (rates, plan.learning_rate), (decays, plan.weight_decay), (momenta, plan.momentum)
        ):  # fmt: skip
            assert_allclose(ax.lines[0].get_ydata()[place], float(schedule(step)))
    assert [label.get_text() for label in sizes.get_yticklabels()] == ["64", "256"]
    assert rates.get_ylabel() == "learning rate"
    assert momenta.get_xlabel() == "examples seen"
    assert seen[-1] == plan.examples_at(plan.total_steps)  # the last step has a width
    with pytest.raises(TypeError, match="must be a BatchPlan"):
        plots.batch_plan("0:64")
    with pytest.raises(ValueError, match="axes must be 4 for this plan, got 1"):
        plots.batch_plan(plan, axes=[sizes])


def test_a_long_plan_has_steep_edges():
    plan = lb.batch_plan("0:1 10001:2", total=30_000, sequence_length=1)
    (sizes,) = plots.batch_plan(plan)
    seen = sizes.lines[0].get_xdata()
    assert {10_000, 10_001} <= set(seen)
    assert sizes.get_xlabel() == "tokens seen"
