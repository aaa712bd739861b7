"""The harness of steps against batch size: the budget, resuming, and what counts as a result."""

import inspect
import json
import math
from pathlib import Path
import subprocess
import sys
import sysconfig
import types

import jax
import jax.numpy as jnp
from matplotlib import pyplot as plt
import numpy as np
import optax
import pytest

from benchmarks.batch_size_curve import __main__ as command
from benchmarks.batch_size_curve import (
    bert,
    pieces,
    provenance,
    quadratic,
    report,
    search,
    stack_ratios,
    training,
)
from benchmarks.batch_size_curve import sweep as sweeping
from benchmarks.batch_size_curve.__main__ import piece
from benchmarks.batch_size_curve.digits import Digits
from benchmarks.batch_size_curve.optimizers import KNOWN as KNOWN_OPTIMIZERS
from benchmarks.batch_size_curve.optimizers import MOMENTUM, OPTIMIZERS
from benchmarks.batch_size_curve.search import Settings
from benchmarks.batch_size_curve.sweep import Cell, sweep
from benchmarks.batch_size_curve.training import Outcome
from benchmarks.batch_size_curve.workloads import (
    CONTROLS,
    MOMENTA,
    ON_A_CPU,
    QUADRATIC,
    WORKLOADS,
    Workload,
)
from benchmarks.harness import machine
import optax_largebatch as lb
from optax_largebatch.diagnostics.colours import OF_OPTIMIZERS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    """The strict promotion of the other tests is too strict for `optax.adamw`."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# The search ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("trials", [3, 8, 64])
def test_every_search_is_as_wide_and_as_long(trials):
    for optimizer in OPTIMIZERS.values():
        space = search.search_space(optimizer.centre, trials)
        rates = np.array([own.learning_rate for own in space])
        steps = np.diff(np.log10(rates))
        np.testing.assert_allclose(steps, search.DECADES / trials, rtol=1e-2)
        np.testing.assert_allclose(np.sqrt(rates[0] * rates[-1]), optimizer.centre, rtol=1e-2)
        assert [own.trial for own in space] == list(range(trials))
        decays = np.array([own.weight_decay for own in space])
        low, high = search.WEIGHT_DECAYS
        assert low <= decays.min() < decays.max() <= high
        assert len(set(decays)) == trials


def test_an_optimizer_chooses_the_middle_of_its_search_and_nothing_else():
    assert list(inspect.signature(search.search_space).parameters) == ["centre", "trials"]
    for workload in WORKLOADS.values():
        spaces = {
            (optimizer, batch_size): Cell(workload, optimizer, batch_size).space
            for optimizer, batch_size in workload.cells()
        }
        assert {len(own) for own in spaces.values()} == {workload.trials}
        assert workload.fine_trials % 2 == 0
        for optimizer, batch_size in spaces:
            assert spaces[optimizer, batch_size] == spaces[optimizer, workload.batch_sizes[0]]


def test_every_optimizer_is_in_the_learned_workloads():
    for name, controls in (("digits", CONTROLS + MOMENTA), ("bert", ())):
        cells = list(WORKLOADS[name].cells())
        names = {*KNOWN_OPTIMIZERS, *controls}
        assert {optimizer for optimizer, _ in cells} == names
        assert len(cells) == len(names) * len(WORKLOADS[name].batch_sizes)
    others = {"bert_pieces", "deep_bert", "large_bert"}
    used = {optimizer for name in others for optimizer, _ in WORKLOADS[name].cells()}
    assert used | set(KNOWN_OPTIMIZERS) == set(OPTIMIZERS)


def test_a_picture_has_at_most_five_colours_beside_grey():
    for workload in WORKLOADS.values():
        names = [name for group in workload.optimizers for name in group]
        coloured = {
            name: colour for name, colour in report.colours(names).items() if colour != report.GREY
        }
        assert len(set(coloured.values())) == len(coloured) <= 5
    assert report.colours(["sgd", "eve"]) == {"sgd": OF_OPTIMIZERS["sgd"], "eve": report.GREY}


def test_names_at_the_ends_of_curves_do_not_overlap():
    """Though five curves end at one place, at the bottom of the picture."""
    figure, axes = plt.subplots()
    axes.set(xscale="log", yscale="log", xlim=(1, 100), ylim=(1, 100))
    ends = dict.fromkeys(report.HIGHLIGHTED, (100, 1.01)) | {"above": (100, 90)}
    report.name_ends(axes, ends, report.colours(ends))
    places = sorted(text.xyann[1] for text in axes.texts)
    assert min(np.diff(places)) > 0.99 * report.LINE_OF_TEXT
    assert 0 <= places[0] < places[-1] <= 1
    assert [text.get_text() for text in axes.texts][-1] == "above"
    plt.close(figure)


def test_grey_curves_have_one_name_together():
    figure, axes = plt.subplots()
    ends = {"adamw": (1, 0.5), "eve": (1, 0.1), "cain": (1, 0.2), "lars": (1, 0.3)}
    report.name_ends(axes, ends, report.colours(ends))
    assert {text.get_text(): text.xy for text in axes.texts} == {
        "adamw": (1, 0.5), "3 others": (1, 0.2),
    }  # fmt: skip
    plt.close(figure)


def test_fine_rates_are_about_the_best_on_both_sides():
    best = Settings(3, 0.1, 1e-3)
    fine = search.refined(best, 8, 4)
    assert [own.trial for own in fine] == [8, 9, 10, 11]
    assert {own.weight_decay for own in fine} == {1e-3}
    rates = sorted([best.learning_rate, *(own.learning_rate for own in fine)])
    np.testing.assert_allclose(np.diff(np.log10(rates)), 0.1, atol=1e-3)
    assert rates[2] == 0.1


def test_order_of_the_trials():
    assert search.from_the_middle(5, 3) == [3, 2, 4, 1, 0]


# The sweep, of a workload whose steps are known ---------------------------------------------------

LIMIT = 1000


def known_steps(settings, seed, batch_size):
    """Best at a rate of 0.08; diverges from 1 on."""
    if settings.learning_rate > 1:
        return math.inf
    distance = np.log10(settings.learning_rate / 0.08)
    return 30 * (1 + 64 / batch_size) * (1 + distance**2) * (1 + 0.05 * seed)


def known(target, optimizer):
    def run(settings, seed, batch_size, most_steps):
        steps = known_steps(settings, seed, batch_size)
        if steps == math.inf:
            return Outcome(math.inf, "diverged", math.nan, math.nan)
        steps = math.ceil(steps)
        if steps > min(most_steps, LIMIT):
            ended = "censored" if most_steps < LIMIT else "out of steps"
            return Outcome(math.inf, ended, 2.0, 2.0)
        return Outcome(steps, "reached", 0.9 + settings.learning_rate / 100, 1.0)

    return run


KNOWN = Workload(
    name="known",
    title="known steps",
    target=1.0,
    batch_sizes=(16, 64, 256),
    optimizers=(("sgd",), ("adamw",)),
    trials=6,
    search_seeds=3,
    seeds=3,
    centre={"sgd": 0.1, "adamw": 10.0}.__getitem__,
    prepare=known,
)


FINE = KNOWN._replace(name="fine", fine_trials=4)


@pytest.fixture
def finished(tmp_path):
    path = tmp_path / "trials.csv"
    sweep(KNOWN, path)
    return path


def of_cell(rows, optimizer, batch_size):
    return [row for row in rows if row[1:3] == (optimizer, batch_size)]


def test_every_cell_has_the_whole_budget_in_the_order_of_the_queue(finished):
    rows = sweeping.read(finished)
    assert list(dict.fromkeys(row[1:3] for row in rows)) == list(KNOWN.cells())
    for place in KNOWN.cells():
        for trial in range(6):
            runs = [row for row in of_cell(rows, *place) if row[3:5] == ("search", trial)]
            assert [row.seed for row in runs] == list(range(3))[: len(runs)]
            failed = [row.steps == math.inf for row in runs]
            assert not any(failed[:-1])
            assert len(runs) == 3 or failed[-1]
        repeats = [row for row in of_cell(rows, *place) if row.role == "repeat"]
        assert [row.seed for row in repeats] == [3, 4, 5]


def test_divergence_counts_as_infinite(finished):
    diverged = [row for row in sweeping.read(finished) if row.ended == "diverged"]
    assert diverged
    assert all(row.steps == math.inf for row in diverged)


def test_the_best_has_the_fastest_slowest_run_wherever_the_search_begins():
    """A run that is stopped early could not have made its trial the best."""
    space = search.search_space(0.1, 6)
    slowest = {own: max(known_steps(own, seed, 64) for seed in range(3)) for own in space}
    for middle in range(6):
        cell, rows = Cell(KNOWN, "sgd", 64), []
        cell.run(known(1.0, "sgd"), middle, rows.append)
        assert any(row.ended == "censored" for row in rows)
        assert cell.best == min(space, key=slowest.__getitem__)
        assert cell.score(cell.best.trial) == math.ceil(min(slowest.values()))
        assert cell.complete


def test_a_rate_that_went_well_once_is_not_taken():
    lucky = search.search_space(0.1, 6)[5]

    def run(settings, seed, batch_size, most_steps):
        if settings == lucky:
            steps = 5 if seed != 1 else math.inf
            return Outcome(steps, "reached" if seed != 1 else "diverged", 0.9, 1.0)
        return known(1.0, "sgd")(settings, seed, batch_size, most_steps)

    cell = Cell(KNOWN, "sgd", 64)
    cell.run(run, 5, lambda row: None)
    assert cell.best not in (lucky, None)
    once = Cell(KNOWN._replace(search_seeds=1), "sgd", 64)
    once.run(run, 5, lambda row: None)
    assert once.best == lucky


def test_a_finer_search_comes_nearer_to_the_best(tmp_path):
    for workload in (KNOWN, FINE):
        sweep(workload, tmp_path / "trials.csv")
    rows = sweeping.read(tmp_path / "trials.csv")
    for place in KNOWN.cells():
        coarse, fine = (sweeping.cells_of(own, rows)[place] for own in (KNOWN, FINE))
        assert len(fine.space) == len(coarse.space) + 4
        tried = np.ceil([known_steps(own, 2, place[1]) for own in fine.space])
        assert tried[fine.best.trial] == min(tried) < min(tried[:6])
        assert {row.trial for row in fine.repeats} == {fine.best.trial}
        assert fine.middle == coarse.best.trial
    # Of the optimizer whose rates are all far too large the best is still at the edge.
    results = report.measured(FINE, rows)
    assert not any(own.edge for own in results["sgd"].values())
    assert all(own.edge for own in results["adamw"].values())


def test_a_sweep_in_pieces_is_the_whole_sweep(tmp_path):
    """In any order, and then nothing is left."""
    whole, pieces = tmp_path / "whole.csv", tmp_path / "pieces.csv"
    sweep(FINE, whole)
    sweep(FINE, pieces, piece(["adamw"], [256, 64]))
    assert {row[1:3] for row in sweeping.read(pieces)} == {("adamw", 64), ("adamw", 256)}
    assert set(report.measured(FINE, sweeping.read(pieces))) == {"adamw"}
    sweep(FINE, pieces, piece(None, [256]))
    sweep(FINE, pieces, piece(["sgd"], None))
    sweep(FINE, pieces)
    of_whole, of_pieces = (report.measured(FINE, sweeping.read(own)) for own in (whole, pieces))
    assert of_whole == of_pieces
    finished = pieces.read_bytes()
    sweep(FINE, pieces)
    assert pieces.read_bytes() == finished


@pytest.mark.parametrize("stop", [0, 1, 5, 7, 17, 40])
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("workload", [KNOWN, FINE], ids=["coarse", "fine"])
def test_a_killed_sweep_continues_to_the_same_table(tmp_path, monkeypatch, workload, stop, torn):
    finished, path = tmp_path / "finished.csv", tmp_path / "killed.csv"
    sweep(workload, finished)
    append, written = sweeping.append, []

    def killed_append(path, row):
        if len(written) == stop:
            raise KeyboardInterrupt
        written.append(row)
        append(path, row)

    with monkeypatch.context() as patch:
        patch.setattr(sweeping, "append", killed_append)
        with pytest.raises(KeyboardInterrupt):
            sweep(workload, path)
    if torn and stop:
        path.write_bytes(path.read_bytes()[:-7])
    counted = []
    again = workload._replace(
        prepare=lambda target, name: lambda *args: counted.append(1) or known(target, name)(*args)
    )
    sweep(again, path)
    assert path.read_bytes() == finished.read_bytes()
    assert len(counted) == len(sweeping.read(finished)) - stop + bool(torn and stop)


def test_a_finished_sweep_runs_nothing(finished):
    def never(target, optimizer):
        raise AssertionError

    sweep(KNOWN._replace(prepare=never), finished)


def test_refuses_to_continue_with_another_plan(tmp_path):
    path = tmp_path / "runs.json"
    provenance.record(path, [KNOWN])
    provenance.record(path, [KNOWN])
    noted = json.loads(path.read_text())
    assert len(noted["runs"]) == 2
    assert set(noted["runs"][0]) == {"started", "command", "machine", "cores", "python"}
    for changed in (KNOWN._replace(trials=7), KNOWN._replace(target=0.5)):
        with pytest.raises(ValueError, match=r"another plan of known: (trials|target) changed"):
            provenance.record(path, [changed])


def test_a_plan_may_grow_by_optimizers_and_batch_sizes(tmp_path):
    path = tmp_path / "runs.json"
    provenance.record(path, [KNOWN])
    more = KNOWN._replace(batch_sizes=(16, 64, 256, 1024), optimizers=(("sgd",), ("adamw", "new")))
    more = more._replace(centre={"sgd": 0.1, "adamw": 10.0, "new": 1.0}.__getitem__)
    provenance.record(path, [more])
    assert json.loads(path.read_text())["plans"]["known"] == more.plan
    moved = more._replace(centre={"sgd": 0.2, "adamw": 10.0, "new": 1.0}.__getitem__)
    for changed, key in ((KNOWN, "batch_sizes"), (moved, "centres_of_learning_rate")):
        with pytest.raises(ValueError, match=f"another plan of known: {key}"):
            provenance.record(path, [changed])


# The report ---------------------------------------------------------------------------------------


def test_medians_and_edges(finished):
    results = report.measured(KNOWN, sweeping.read(finished))
    for batch_size, cell in results["sgd"].items():
        assert not cell.edge
        steps = [math.ceil(known_steps(cell.settings, seed, batch_size)) for seed in (3, 4, 5)]
        assert cell.runs == tuple(steps)
        assert cell.median == steps[1]
    # Its rates are far too large for this problem: the best is the smallest there is.
    assert all(cell.edge for cell in results["adamw"].values())
    table = report.steps_table(KNOWN, results)
    assert table.count("\\*") == 3
    assert table.count("**") == 2 * 3


def test_a_cell_without_its_whole_budget_is_no_result(finished):
    rows = sweeping.read(finished)
    own = of_cell(rows, "sgd", 64)
    others = [row for row in rows if row not in own]
    for length in range(len(own)):
        assert 64 not in report.measured(KNOWN, [*others, *own[:length]])["sgd"]
    assert 64 in report.measured(KNOWN, [*others, *own])["sgd"]


def test_a_cell_with_more_than_its_budget_is_an_error(finished):
    rows = sweeping.read(finished)
    repeat = of_cell(rows, "sgd", 64)[-1]
    tried = next(row for row in of_cell(rows, "sgd", 64) if row.role == "search")
    tables = [
        [*rows, repeat._replace(seed=6)],
        [*rows, repeat],
        [*rows, tried._replace(seed=3)],
        [tried._replace(learning_rate=0.123) if row is tried else row for row in rows],
        [tried._replace(weight_decay=0.1) if row is tried else row for row in rows],
        [tried._replace(seed=1) if row is tried else row for row in rows],
    ]
    for table in tables:
        with pytest.raises(ValueError, match="sgd at batch size 64 of known has a trial that is"):
            report.measured(KNOWN, table)


def test_a_cell_without_success_is_infinite(tmp_path):
    hopeless = KNOWN._replace(centre=lambda optimizer: 1e6)
    path = tmp_path / "trials.csv"
    sweep(hopeless, path)
    results = report.measured(hopeless, sweeping.read(path))
    assert {cell.median for own in results.values() for cell in own.values()} == {math.inf}
    assert "never" in report.steps_table(hopeless, results)
    assert report.fit(results["sgd"]) == "the target was reached at fewer than three batch sizes"


def test_fit_of_the_report(finished):
    results = report.measured(KNOWN, sweeping.read(finished))
    np.testing.assert_allclose(report.fit(results["sgd"]).critical_batch_size, 64, rtol=0.05)
    flat = dict.fromkeys((16, 64, 256), results["sgd"][64])
    assert report.fit(flat) == "the steps do not bend"


def test_bootstrap_interval():
    assert report.bootstrap_interval([5.0]) == (5, 5)
    assert report.bootstrap_interval([3.0, 1.0, 2.0]) == (1, 3)
    assert report.bootstrap_interval([1.0, 2.0, math.inf]) == (1, math.inf)
    draw = np.random.default_rng(0)
    held = []
    for _ in range(200):
        low, high = report.bootstrap_interval(draw.normal(size=31), resamples=200)
        held.append(low < 0 < high)
    assert 0.8 <= np.mean(held) <= 0.97


def test_writes_a_report_and_a_plot(finished):
    report.write_report(finished.parent, [KNOWN, QUADRATIC])
    text = (finished.parent / "report.md").read_text()
    assert report.tables(KNOWN, sweeping.read(finished)) in text
    assert "quadratic" not in text  # it has no rows
    assert (finished.parent / "known.png").stat().st_size > 10_000


# Training -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task():
    return Digits(target=1.5)


@pytest.fixture(scope="module")
def run(task):
    return training.prepare(task, "sgd")


SETTINGS = Settings(0, 0.05, 1e-3)


def test_trains_on_whole_batches_until_the_target(task, run):
    """The same as a plain loop over large batches, with the schedule and decay written out."""
    for_params, for_stream = jax.random.split(jax.random.key(7))
    params, order = task.init(for_params), np.asarray(task.stream(for_stream))
    momentum = jax.tree.map(jnp.zeros_like, params)
    gradient, loss = jax.jit(jax.grad(task.loss)), jax.jit(task.loss)
    size, steps, losses = 64, 0, []
    while not losses or losses[-1] > task.target:
        chosen = order[steps * size : (steps + 1) * size]
        grads = gradient(params, jax.tree.map(lambda own: own[chosen], task.training))  # noqa: B023
        rate = 0.05 * min((steps + 1) / 5, 1)
        for own, grad, velocity in zip(params, grads, momentum, strict=True):
            for name in own:
                decay = 1e-3 if name == "kernel" else 0.0
                full = grad[name] + decay * own[name]
                velocity[name] = 0.9 * velocity[name] + full
                own[name] = own[name] - rate * (full + 0.9 * velocity[name])
        steps += 1
        losses.append(float(loss(params, task.validation)))
    outcome = run(SETTINGS, 7, size, math.inf)
    assert outcome.ended == "reached"
    assert outcome.steps == steps > 5
    np.testing.assert_allclose(outcome.validation_loss, losses[-1], rtol=1e-4)
    np.testing.assert_allclose(outcome.test_loss, loss(params, task.test), rtol=1e-4)
    assert outcome.test_loss != outcome.validation_loss


def test_how_trials_end(task, run):
    reached = run(SETTINGS, 0, 64, math.inf)
    assert run(SETTINGS, 0, 64, reached.steps) == reached
    fewer = run(SETTINGS, 0, 64, reached.steps - 1)
    assert fewer[:2] == (math.inf, "censored")
    assert fewer.validation_loss > task.target
    assert run(SETTINGS._replace(learning_rate=1e12), 0, 64, math.inf)[:2] == (math.inf, "diverged")
    hopeless = SETTINGS._replace(learning_rate=1e-9)
    assert run(hopeless, 0, 1024, math.inf)[:2] == (math.inf, "out of steps")


def test_refuses_a_batch_that_is_no_multiple_of_the_micro_batch(run):
    with pytest.raises(ValueError, match="batch_size must be a multiple of 16, got 24"):
        run(SETTINGS, 0, 24, math.inf)


def test_evaluations_are_close_to_each_other():
    steps = np.array(training.evaluations(5, 3000))
    gaps = np.diff(steps)
    assert steps[0] == 5
    assert np.all((gaps == 1) | (gaps <= steps[:-1] / 25))


def test_order_of_the_digits_is_epochs(task):
    order = np.asarray(task.stream(jax.random.key(0)))[: 2 * 1024].reshape(2, -1)
    assert np.array_equal(np.sort(order), np.tile(np.arange(1024), (2, 1)))
    assert not np.array_equal(*order)
    parts = [task.training, task.validation, task.test]
    assert [len(part.labels) for part in parts] == [1024, 386, 387]


@pytest.mark.parametrize("optimizer", [name for name, own in OPTIMIZERS.items() if own.decays])
def test_no_optimizer_decays_or_adapts_a_bias(optimizer):
    """Where a bias is does not change where it goes; where a kernel is does."""
    transformation = OPTIMIZERS[optimizer].build(optax.constant_schedule(0.1), 1e-2, None)
    kernel, bias = jnp.full((2, 2), 0.3), jnp.full(2, 0.3)
    grads = {"embedding": kernel, "kernel": kernel, "bias": bias}

    @jax.jit
    def updates(size):
        params = jax.tree.map(lambda own: jnp.full_like(own, size), grads)
        return transformation.update(grads, transformation.init(params), params)[0]

    small, large = updates(0.5), updates(2.0)
    np.testing.assert_array_equal(small["bias"], large["bias"])
    for name in ("embedding", "kernel"):
        assert np.all(np.asarray(small[name]) != np.asarray(large[name]))


# The controls -------------------------------------------------------------------------------------


def two_steps(transformation, scale=1.0):
    """The second update of a kernel and a bias."""
    draw = jax.random.normal
    params = {"kernel": draw(jax.random.key(0), (4, 3)), "bias": jnp.full(3, 0.1)}
    state = transformation.init(params)
    for seed in (1, 2):
        keys = jax.random.split(jax.random.key(seed))
        grads = {"kernel": scale * draw(keys[0], (4, 3)), "bias": scale * draw(keys[1], (3,))}
        updates, state = transformation.update(grads, state, params)
    return updates


def built(name, stacked=None):
    return OPTIMIZERS[name].build(optax.constant_schedule(0.1), 1e-2, stacked)


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), actual, expected)


def test_lans_is_its_pieces():
    """Each control is LANS without one thing."""
    along_gradient = optax.chain(
        lb.normalize_by_block_norm(),
        lb.lamb(
            0.1,
            0.0,
            0.98,
            weight_decay=1e-2,
            weight_decay_mask=~lb.matching("bias"),
            trust_ratio_mask=~lb.matching("bias"),
        ),
    )
    along_momentum, along_gradient = map(
        two_steps, (built("lans_without_nesterov"), along_gradient)
    )
    both = jax.tree.map(
        lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, along_momentum, along_gradient
    )
    close(two_steps(built("lans")), both)

    unnormalised = built("lans_without_normalization")
    close(
        two_steps(optax.chain(lb.normalize_by_block_norm(), unnormalised)),
        two_steps(built("lans")),
    )
    # The gradients' size does not matter, but their sizes from step to step do.
    assert not np.allclose(two_steps(unnormalised)["kernel"], both["kernel"], rtol=1e-3)

    unadapted = two_steps(built("lans_without_trust_ratio"))
    np.testing.assert_allclose(unadapted["bias"], both["bias"], rtol=2e-5)
    assert not np.allclose(unadapted["kernel"], both["kernel"], rtol=0.1)


def test_lans_without_trust_ratio_is_adam_with_nesterovs_momentum():
    """On normalised gradients; optax corrects the bias of the momentum for one step more."""
    update = two_steps(built("lans_without_trust_ratio"))["kernel"]
    draw = jax.random.normal
    mu, nu, param = 0.0, 0.0, np.asarray(draw(jax.random.key(0), (4, 3)), np.float64)
    for seed in (1, 2):
        grad = np.asarray(draw(jax.random.split(jax.random.key(seed))[0], (4, 3)), np.float64)
        grad /= np.linalg.norm(grad)
        mu, nu = 0.9 * mu + 0.1 * grad, 0.98 * nu + 0.02 * grad**2
    denominator = np.sqrt(nu / (1 - 0.98**2)) + 1e-6
    step = (0.9 * mu / (1 - 0.9**2) + 0.1 * grad) / denominator + 1e-2 * param
    np.testing.assert_allclose(update, -0.1 * step, rtol=1e-4)


@pytest.mark.parametrize("name", ["lamb", "lans"])
def test_one_norm_is_what_an_optimizer_does_that_is_told_nothing(name):
    stacked = lb.stacked_layers({"kernel": 0})
    kernels = jnp.stack([jnp.ones((2, 2)), jnp.full((2, 2), 10.0)])
    params = {"kernel": kernels, "bias": jnp.ones(2)}
    grads = {"kernel": jnp.ones((2, 2, 2)), "bias": jnp.ones(2)}
    lengths = {}
    for own in (name, f"{name}_one_norm"):
        transformation = built(own, stacked)
        update = transformation.update(grads, transformation.init(params), params)[0]["kernel"]
        lengths[own] = np.linalg.norm(np.asarray(update), axis=(1, 2)) / [2, 20]
    np.testing.assert_allclose(lengths[name], 0.1, rtol=1e-3)
    assert lengths[f"{name}_one_norm"][0] > 5 * lengths[f"{name}_one_norm"][1]


# What the pieces bring ----------------------------------------------------------------------------


def runs_of(steps):
    return report.Measured(tuple(steps), edge=False, settings=None, test_losses=())


def test_every_pair_differs_in_one_piece():
    """By what is left out of LANS."""
    has = {
        "adamw": set(),
        "nadamw": {"Nesterov's momentum"},
        "lamb": {"trust ratio"},
        "lans": set(pieces.ADDED),
    }
    has["lans_without_nesterov"] = has["lans"] - {"Nesterov's momentum"}
    has["lans_without_normalization"] = has["lans"] - {"normalised gradients"}
    has["lans_without_trust_ratio"] = has["lans"] - {"trust ratio"}
    for piece_added, pairs in pieces.ADDED.items():
        for before, after in pairs:
            assert has[after] - has[before] == {piece_added}
            assert has[before] < has[after]


def test_saved_steps():
    before, after = runs_of([100, 101, 99, 100, 102]), runs_of([50, 51, 49, 50, 52])
    own = pieces.saved([before], [after])
    assert own.share == 0.5
    assert 0.45 < own.low < own.share < own.high < 0.55
    assert own.clear
    assert str(own).startswith("**50%**")
    assert not pieces.saved([before], [before]).clear
    # Half at one batch size, as many at another: in the geometric mean 1 - sqrt(1/2).
    np.testing.assert_allclose(
        pieces.saved([before, before], [after, before]).share, 1 - 0.5**0.5, rtol=1e-6
    )
    never = runs_of([100, math.inf, math.inf, math.inf, 99])
    assert pieces.saved([before], [never]).share == -math.inf


def test_a_table_of_pieces_has_the_batch_sizes_that_all_have():
    names = {name for pairs in pieces.ADDED.values() for pair in pairs for name in pair}
    results = {name: {32: runs_of([9] * 5), 128: runs_of([8] * 5)} for name in names}
    results["lans"] = {32: runs_of([6] * 5)}
    head, _, *lines = pieces.saved_table(results, pieces.ADDED).splitlines()
    assert head == "| from one to the other | 32 | all of them |"
    assert len(lines) == 9
    assert sum("**33%** (33 to 33) | **33%**" in line for line in lines) == 3


# Text ---------------------------------------------------------------------------------------------


def test_text_has_each_file_once_and_no_file_in_two_parts(tmp_path, monkeypatch):
    contents = [f"# file {index}\n".encode() * 3 for index in range(64)]
    for index, content in enumerate(contents):
        (tmp_path / f"module_{index}.py").write_bytes(content)
    for folder in ("package", "site-packages", "test"):
        (tmp_path / folder).mkdir()
    (tmp_path / "package" / "copy.py").write_bytes(contents[0])
    (tmp_path / "site-packages" / "other.py").write_bytes(b"# of somebody else's package\n")
    (tmp_path / "test" / "test_it.py").write_bytes(b"# the tests are often not installed\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    parts = {name: text.tobytes() for name, text in bert.library_text().items()}
    assert sum(map(len, parts.values())) == sum(map(len, contents))
    for content in contents:
        assert sorted(text.count(content) for text in parts.values()) == [0, 0, 1]


@pytest.fixture(scope="module")
def little_text(tmp_path_factory):
    """A standard library of short files."""
    folder = tmp_path_factory.mktemp("library")
    for index in range(200):
        (folder / f"module_{index}.py").write_bytes(f"x{index} = {index} ** 2\n".encode() * 90)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
        yield


TINY = bert.SMALL._replace(layers=3, width=8, most_steps=30)


def test_scanned_layers_are_the_layers(little_text):
    apart, scanned = (bert.Bert(2.6, TINY._replace(stacked=own)) for own in (False, True))
    params, stack = (own.init(jax.random.key(0)) for own in (apart, scanned))
    assert stack["layers"]["query"]["kernel"].shape == (3, 8, 8)
    losses = [
        jax.jit(task.loss)(own, task.validation)
        for task, own in ((apart, params), (scanned, stack))
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert apart.stacked is None
    assert (0,) in scanned.stacked.axes(stack)


def test_the_large_workload_takes_a_batch_of_32768_by_accumulation(little_text):
    """Its shapes; nothing is run."""
    task = bert.Bert(1.0, bert.LARGE)
    params = jax.eval_shape(task.init, jax.random.key(0))
    assert params["layers"]["up"]["kernel"].shape == (12, 512, 2048)
    sizes = WORKLOADS["large_bert"].batch_sizes
    assert max(sizes) == 32768
    assert all(size % task.micro_batch == 0 for size in sizes)
    transformation = built("lans", task.stacked)

    def step(params, batch_size):
        train_step = training.training_step(task, transformation, jax.random.key(0), batch_size)
        return train_step(jnp.asarray(0), (params, transformation.init(params)))

    after, _ = jax.eval_shape(step, params, jnp.asarray(32768))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, params)


def test_large_workload_is_only_run_when_it_is_asked_for():
    assert "large_bert" not in ON_A_CPU
    assert set(ON_A_CPU) < set(WORKLOADS)


class Uneven(bert.Bert):
    """With layers of different size."""

    def init(self, key):
        params = super().init(key)
        sizes = jnp.array([1.0, 2.0, 4.0])
        for own in ("query", "key", "value", "output", "up", "down"):
            params["layers"][own]["kernel"] *= sizes[:, None, None]
        return params


def test_stack_ratios_are_those_of_each_layer(little_text, tmp_path):
    task = Uneven(2.6, TINY._replace(stacked=True))
    rows = stack_ratios.run(task, SETTINGS._replace(weight_decay=0.0), 32, seed=0, steps=10)
    assert {own.parameter for own in rows} == {"query", "key", "value", "output", "up", "down"}
    assert {own.step for own in rows} == {1, 2, 3, 4, 5, 6, 7, 8, 10}
    # In the first step of LAMB every entry of the Adam direction is 1 or -1, or nearly.
    params = task.init(jax.random.split(jax.random.key(0))[0])
    for own in rows[::9]:
        assert own.step == 1
        kernel = np.asarray(params["layers"][own.parameter]["kernel"])
        rms = np.sqrt(np.mean(kernel**2, axis=(1, 2)))
        np.testing.assert_allclose(own.ratios, rms, rtol=0.15)
        assert own.times == max(own.ratios) / min(own.ratios) > 3
    stack_ratios.write(rows, tmp_path / "ratios.csv")
    assert stack_ratios.read_spreads(tmp_path / "ratios.csv") == rows
    stack_ratios.plot(rows, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").stat().st_size > 10_000


# The quadratic ------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_expected_losses_are_those_of_a_sample(momentum):
    draw, h, walkers = np.random.default_rng(0), quadratic.CURVATURES, 4000
    w, m = np.ones((walkers, len(h))), np.zeros((walkers, len(h)))
    losses = quadratic.expected_losses(0.1, momentum, 4)
    for _ in range(12):
        noise = np.sqrt(quadratic.NOISE * h / 4) * draw.standard_normal(w.shape)
        gradient = h * w + noise
        m = momentum * m + gradient
        w = w - 0.1 * (gradient + momentum * m)
        sampled = 0.5 * (w**2 @ h)
        error = sampled.std() / np.sqrt(walkers)
        assert abs(sampled.mean() - next(losses)) < 4 * error


def test_the_harness_finds_the_critical_batch_size_of_the_quadratic(tmp_path):
    """The oracle: searched, measured and fitted like every other workload."""
    workload = QUADRATIC._replace(
        batch_sizes=(2, 8, 32, 128, 512), optimizers=(("plain sgd",),), trials=48
    )
    sweep(workload, tmp_path / "trials.csv")
    results = report.measured(workload, sweeping.read(tmp_path / "trials.csv"))
    fit = report.fit(results["plain sgd"])
    least, critical = quadratic.exact_fit(workload.target)["plain sgd"]
    np.testing.assert_allclose(fit.critical_batch_size, critical, rtol=0.15)
    np.testing.assert_allclose(fit.minimum_steps, least, rtol=0.15)
    assert fit.residual < 0.05


# The command --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("tpu", "TPU v5 lite", "tpu-v5-lite"),
        ("cpu", "cpu", "cpu-2-cores"),
    ],
)
def test_results_that_are_kept_lie_in_a_folder_of_the_chip(monkeypatch, platform, kind, name):
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    monkeypatch.setattr(machine.jax, "devices", lambda: [device])
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    assert machine.folder() == name


def test_keeps_results_where_the_chip_says(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "COMMITTED", tmp_path)
    monkeypatch.setattr(command, "folder", lambda: "some-chip")
    output = tmp_path / "some-chip" / "batch_size_curve"
    output.mkdir(parents=True)
    (output / "trials.csv").write_text(finished.read_text().splitlines()[0] + "\n")
    command.main(["--keep", "--report"])
    assert (output / "report.md").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_quick_command_twice(tmp_path):
    """In less than three minutes where the machine is not busy; a second time nothing is run."""
    command = [sys.executable, "-m", "benchmarks.batch_size_curve", "--quick"]
    tables = []
    for _ in range(2):
        subprocess.run([*command, "--output", str(tmp_path)], cwd=ROOT, check=True, timeout=900)
        tables.append((tmp_path / "trials.csv").read_bytes())
    assert tables[0] == tables[1]
    text = (tmp_path / "report.md").read_text()
    assert all(f"| `{name}` |" in text for name in ("plain sgd", "adamw", "lars", "lamb"))
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "quadratic.png",
        "digits.png",
    }
    assert len(json.loads((tmp_path / "runs.json").read_text())["runs"]) == 2
