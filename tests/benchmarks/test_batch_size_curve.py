"""The harness of steps against batch size: the budget, resuming, and what counts as a result."""

import inspect
import json
import math
from pathlib import Path
import subprocess
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.batch_size_curve import bert, provenance, quadratic, report, search, training
from benchmarks.batch_size_curve import sweep as sweeping
from benchmarks.batch_size_curve.digits import Digits
from benchmarks.batch_size_curve.optimizers import OPTIMIZERS
from benchmarks.batch_size_curve.search import Settings
from benchmarks.batch_size_curve.sweep import Cell, sweep
from benchmarks.batch_size_curve.training import Outcome
from benchmarks.batch_size_curve.workloads import QUADRATIC, WORKLOADS, Workload

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
        for optimizer, batch_size in spaces:
            assert spaces[optimizer, batch_size] == spaces[optimizer, workload.batch_sizes[0]]


def test_every_optimizer_is_in_the_learned_workloads():
    for name in ("digits", "bert"):
        cells = list(WORKLOADS[name].cells())
        assert {optimizer for optimizer, _ in cells} == set(OPTIMIZERS)
        assert len(cells) == len(OPTIMIZERS) * len(WORKLOADS[name].batch_sizes)


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


@pytest.mark.parametrize("stop", [0, 1, 5, 7, 17, 40])
@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_sweep_continues_to_the_same_table(finished, tmp_path, monkeypatch, stop, torn):
    path = tmp_path / "killed.csv"
    append, written = sweeping.append, []

    def killed_append(path, row):
        if len(written) == stop:
            raise KeyboardInterrupt
        written.append(row)
        append(path, row)

    with monkeypatch.context() as patch:
        patch.setattr(sweeping, "append", killed_append)
        with pytest.raises(KeyboardInterrupt):
            sweep(KNOWN, path)
    if torn and stop:
        path.write_bytes(path.read_bytes()[:-7])
    counted = []
    again = KNOWN._replace(
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
    transformation = OPTIMIZERS[optimizer].build(optax.constant_schedule(0.1), 1e-2)
    grads = {"kernel": jnp.full((2, 2), 0.3), "bias": jnp.full(2, 0.3)}

    @jax.jit
    def updates(size):
        params = jax.tree.map(lambda own: jnp.full_like(own, size), grads)
        return transformation.update(grads, transformation.init(params), params)[0]

    small, large = updates(0.5), updates(2.0)
    np.testing.assert_array_equal(small["bias"], large["bias"])
    assert np.all(np.asarray(small["kernel"]) != np.asarray(large["kernel"]))


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


@pytest.mark.slow
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
        "bert.png",
    }
    assert len(json.loads((tmp_path / "runs.json").read_text())["runs"]) == 2
