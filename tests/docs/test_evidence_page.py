"""The pages say what the committed trials say."""

from pathlib import Path
import runpy

import numpy as np
import pytest

from benchmarks.batch_size_curve.report import bootstrap_interval, fit, measured
from benchmarks.batch_size_curve.sweep import read
from benchmarks.batch_size_curve.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs" / "write_evidence.py"))


@pytest.mark.parametrize("name", ["README.md", "docs/evidence.md"])
class TestPage:
    def test_is_what_the_script_writes(self, script, name):
        page = (ROOT / name).read_text()
        assert script["written"](ROOT / name, page) == page

    def test_the_script_puts_right_what_is_wrong(self, script, name):
        page = (ROOT / name).read_text()
        wrong = page.replace("| `sgd` | ", "| `sgd` | 7")
        assert wrong != page
        assert script["written"](ROOT / name, wrong) == page

    def test_refuses_a_page_without_the_places(self, script, name):
        with pytest.raises(ValueError, match="must have one '<!-- "):
            script["written"](ROOT / name, "# Evidence\n")


# The sentences of the page, in numbers.


@pytest.fixture(scope="module")
def results(script):
    rows = read(script["TRIALS"])
    return {name: measured(workload, rows) for name, workload in WORKLOADS.items()}


def medians(results, batch_size):
    return {name: own[batch_size].median for name, own in results.items() if batch_size in own}


def test_conclusion_of_the_digits(results):
    own = results["digits"]
    for batch_size in (128, 256, 512, 1024):
        steps = medians(own, batch_size)
        adams = [steps.pop("adamw"), steps.pop("eve")]
        assert len(steps) == 8
        assert min(steps.values()) >= 1.15 * max(adams)
    for batch_size in (16, 32, 64):
        low, high = bootstrap_interval(own["adamw"][batch_size].runs)
        assert low <= min(medians(own, batch_size).values()) <= high


def test_conclusion_of_bert(results):
    own = results["bert"]
    fewer = {"lans": [], "lamb": [], "scaled_adam": [], "cain": []}
    for batch_size in (32, 128, 512, 2048):
        steps = medians(own, batch_size)
        assert len(steps) == 10
        assert steps["lans"] == min(steps.values())
        assert steps["sgd"] == max(steps.values())
        for name, own_fewer in fewer.items():
            own_fewer.append(round(1 - steps[name] / steps["adamw"], 2))
    assert (min(fewer["lans"]), max(fewer["lans"])) == (0.21, 0.38)
    assert fewer["lamb"][0] == 0.21
    assert max(map(abs, fewer["lamb"][1:])) <= 0.11
    next_to_lans = fewer["scaled_adam"] + fewer["cain"]
    assert (min(next_to_lans), max(next_to_lans)) == (0.20, 0.32)
    others = {name: results["bert"][name] for name in ("adamw", "eve", "lars", "lbsgd", "sgd")}
    assert all(
        max(medians(own, size)[name] for name in ("scaled_adam", "cain"))
        < min(medians(others, size).values())
        for size in (32, 128, 512, 2048)
    )


def test_conclusion_of_the_quadratic(results):
    own = results["quadratic"]
    plain, momentum = fit(own["plain sgd"]), fit(own["sgd"])
    exact = WORKLOADS["quadratic"].exact(WORKLOADS["quadratic"].target)["plain sgd"][1]
    assert (round(plain.critical_batch_size), round(exact)) == (53, 58)
    np.testing.assert_allclose(momentum.critical_batch_size / plain.critical_batch_size, 2, 0.15)
    saved = {
        size: 1 - own["sgd"][size].median / own["plain sgd"][size].median for size in (1, 1024)
    }
    assert round(saved[1], 2) == 0.03
    assert saved[1024] > 0.5
