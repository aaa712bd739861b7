"""The evidence with tuned optimizers: equal budgets, seeds, resuming, and intervals of pairs."""

import json
import math
import shlex
import sys
import sysconfig
from types import SimpleNamespace

import jax
import numpy as np
from numpy.testing import assert_allclose
import pytest
import scipy

from benchmarks import transfer
from benchmarks.harness.colours import COLOURS, colours_of
from benchmarks.harness.results import COMMITTED, read
from benchmarks.muonh_varied import FusedModel
from benchmarks.tuned import bert, causal, digits, report, results, search, tables, training
from benchmarks.tuned.__main__ import piece
from benchmarks.tuned.arms import ARMS
from benchmarks.tuned.bert import Bert
from benchmarks.tuned.cell import Cell
from benchmarks.tuned.intervals import difference
from benchmarks.tuned.provenance import record
from benchmarks.tuned.schedules import constant, schedule
from benchmarks.tuned.search import Budget, Settings
from benchmarks.tuned.sweep import Row, cells_of, sweep, table_of
from benchmarks.tuned.training import Losses, compiled, steps_of
from benchmarks.tuned.workloads import QUICK, WORKLOADS, Workload

pytestmark = pytest.mark.usefixtures("standard_promotion")


# The budget ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_every_optimizer_has_the_same_budget_in_each_cell(workload):
    cells = [Cell(workload, *place) for place in workload.cells()]
    assert {len(cell.space) for cell in cells} == {workload.budget.trials}
    assert Budget().runs == 64 + 4 * 2 + 8
    assert len(cells) == len(workload.optimizers) * len(workload.plans)
    for cell in cells:
        relative, first = (
            [(own.learning_rate / x.arm.centre, own.momentum) for own in x.space]
            for x in (cell, cells[0])
        )
        assert_allclose(relative, first, rtol=1e-3)
        decays = {own.weight_decay for own in cell.space}
        by_adamw = search.search_space(ARMS["adamw"].centre, True, len(cell.space))
        assert decays == ({own.weight_decay for own in by_adamw} if cell.arm.decays else {0.0})


@pytest.mark.parametrize("trials", [16, 64])
def test_the_trials_fill_their_ranges(trials):
    _, rates, decays, momenta = np.array(search.search_space(0.03, True, trials)).T
    rates = np.log10(rates / 0.03)
    assert -1 <= rates.min() < -0.9 < 0.8 < rates.max() <= 1
    assert np.diff(np.sort(rates)).max() < 0.2
    on = decays[decays > 0]
    assert trials / 8 <= np.sum(decays == 0) <= trials / 4
    assert 1e-3 <= on.min() < 2e-3 < 0.4 < on.max() <= 1
    assert 0.5 <= momenta.min() < 0.55 < 0.94 < momenta.max() <= 0.95
    correlations = np.corrcoef([rates, np.log(np.maximum(decays, 3e-4)), np.log(1 - momenta)])
    assert np.abs(correlations - np.eye(3)).max() < 0.35


@pytest.mark.parametrize("budget", [Budget(), QUICK["bert"].budget])
def test_no_seed_of_the_search_is_reported(budget):
    assert not set(budget.search_seeds) & set(budget.final_seeds)
    assert len(budget.final_seeds) == budget.finals >= budget.around


# The sweep, of a network whose losses are known ---------------------------------------------------

BATCHES = constant({32: 4, 64: 4})
HASTY = Budget(trials=8, finalists=3, again=2, finals=4, around=2)
OPTIMIZERS = ("adamw", "muonh")


class Known:
    data = "none"


KNOWN = Workload("known", "known losses", Known, BATCHES, OPTIMIZERS, ("64", "32"), ("64",))
KNOWN = KNOWN._replace(budget=HASTY)


def known_losses(optimizer, settings, seed):
    """Best near the centre; a seed may turn the order of two trials, and one trial diverges."""
    distance = math.log10(settings.learning_rate / ARMS[optimizer].centre)
    if distance > 0.4:
        return Losses(math.nan, math.nan)
    luck = 0.3 * math.sin(7 * seed + 3 * settings.trial)
    loss = 2 + distance**2 + settings.weight_decay / 10 + luck
    return Losses(round(loss, 5), round(loss + 1, 5))


def known(task, arm, side_by_side):
    (optimizer,) = (name for name, own in ARMS.items() if own == arm)
    return lambda plan, jobs: (known_losses(optimizer, *job) for job in jobs)


def run(output, chosen=lambda *place: True, prepare=known, workload=KNOWN):
    sweep(workload, output, chosen, prepare)
    return read(table_of(workload, output), Row)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return run(tmp_path_factory.mktemp("known"))


def of(rows, **values):
    return [row for row in rows if all(getattr(row, key) == own for key, own in values.items())]


def test_every_cell_spends_its_budget(rows):
    for optimizer, batches in KNOWN.cells():
        own = of(rows, optimizer=optimizer, batches=batches)
        counts = {role: len(of(own, role=role)) for role in ("search", "again", "final")}
        assert counts == {"search": 8, "again": 3 * 2, "final": 4}
        assert sum(counts.values()) == HASTY.runs
        searched = {row.seed for row in own if row.role in ("search", "again")}
        assert searched == {0, 1, 2}
        assert {row.seed for row in own if row.role not in ("search", "again")} == {3, 4, 5, 6}


def test_around_the_chosen_settings_only_where_asked(rows):
    assert not of(rows, batches="32", role="rate")
    rates = of(rows, batches="64", role="rate", optimizer="muonh")
    assert len(rates) == 2 * len(search.FACTORS)
    assert {row.seed for row in rates} == {3, 4}
    assert not of(rows, role="decay", optimizer="muonh")
    decays = of(rows, role="decay", optimizer="adamw")
    assert {row.weight_decay for row in decays} == set(search.DECAYS)
    assert len({row.learning_rate for row in decays}) == 1


def test_the_chosen_settings_are_the_best_in_the_mean_by_validation(rows):
    for cell in cells_of(KNOWN, rows).values():
        first = {own: known_losses(cell.optimizer, own, 0).validation for own in cell.space}
        finite = {own: loss if loss == loss else math.inf for own, loss in first.items()}
        finalists = sorted(finite, key=finite.__getitem__)[:3]
        again = of(rows, optimizer=cell.optimizer, batches=cell.batches, role="again")
        assert {row.trial for row in again} == {own.trial for own in finalists}

        def mean(own, cell=cell):
            return sum(known_losses(cell.optimizer, own, seed).validation for seed in range(3))

        assert cell.chosen == min(finalists, key=mean)
        final = of(rows, optimizer=cell.optimizer, batches=cell.batches, role="final")
        assert {row.trial for row in final} == {cell.chosen.trial}
    # A lucky first seed alone would have chosen otherwise somewhere.
    cells = cells_of(KNOWN, rows).values()
    assert any(cell.chosen != cell.finalists[0] for cell in cells)


def test_the_test_loss_chooses_nothing(tmp_path, rows):
    def other(*arm):
        def run(plan, jobs):
            return (own._replace(test=-own.test) for own in known(*arm)(plan, jobs))

        return run

    again = run(tmp_path, prepare=other)
    assert [str(row[:9]) for row in again] == [str(row[:9]) for row in rows]


@pytest.mark.parametrize(("stop", "torn"), [(0, 0), (1, 7), (9, 0), (15, 7), (60, 0)])
def test_a_killed_sweep_continues_to_the_same_table(tmp_path, stop, torn):
    """What it had finished is in the table, but maybe for the end of the last line."""
    run(tmp_path)
    path = table_of(KNOWN, tmp_path)
    whole = path.read_text()
    finished = "".join(whole.splitlines(keepends=True)[: stop + 1])
    path.write_text(finished[: len(finished) - torn])
    run(tmp_path)
    assert path.read_text() == whole
    noted = path.with_suffix(".json").read_text()
    run(tmp_path, prepare=lambda *_: pytest.fail("nothing is left"))
    assert path.with_suffix(".json").read_text() == noted


def test_pieces_in_any_order_are_the_whole(tmp_path, rows):
    assert {row[:2] for row in run(tmp_path, piece(["muonh"], ["32"]))} == {("muonh", "32")}
    run(tmp_path, piece(None, ["64"]))
    assert sorted(map(str, run(tmp_path))) == sorted(map(str, rows))


def test_refuses_a_run_that_is_not_in_the_budget(rows):
    for wrong in ([*rows, rows[-1]._replace(seed=99)], [rows[0]._replace(learning_rate=1.0)]):
        with pytest.raises(ValueError, match="not the next of its budget"):
            cells_of(KNOWN, wrong)


def test_a_search_that_is_complete_stays_what_it_was(rows, monkeypatch):
    """Even if others are searched in another space since."""
    before = [row for row in rows if row.batches == "64"]
    monkeypatch.setattr(search, "MOMENTA", (0.1, 0.2))
    cells = cells_of(KNOWN, before)
    assert max(own.momentum for own in cells["muonh", "32"].space) < 0.21
    assert not cells["muonh", "64"].left
    assert {own.momentum for own in cells["muonh", "64"].space} == {row.momentum for row in before}
    with pytest.raises(ValueError, match="not the next of its budget"):
        cells_of(KNOWN, before[: HASTY.trials - 1])


def test_refuses_to_continue_with_another_plan_or_on_other_data(tmp_path):
    """As where another Python has another text."""
    path = tmp_path / "known.json"
    record(path, KNOWN)
    (noted,) = json.loads(path.read_text())["runs"]
    assert shlex.split(noted["command"]) == ["python", *sys.orig_argv[1:]]
    assert noted["processor"]
    assert noted["data"] == "none"
    other = KNOWN._replace(task=lambda: SimpleNamespace(data="another text"))
    with pytest.raises(ValueError, match="on other data: none, and this machine has another text"):
        record(path, other)
    more = KNOWN._replace(plans=BATCHES | constant({128: 4}))
    record(path, more)
    for changed in (
        more._replace(budget=HASTY._replace(trials=16)),
        more._replace(plans=constant({32: 5, 64: 4, 128: 4})),
        KNOWN,
    ):
        with pytest.raises(ValueError, match=r"another plan of known: (budget|batch_sizes)"):
            record(path, changed)


def test_the_data_of_the_networks_is_their_text(tiny, monkeypatch):
    again = Bert(TINY, held_out=16)
    assert again.data == tiny.data
    text = {name: own[:-1] for name, own in bert.library_text().items()}
    monkeypatch.setattr(bert, "library_text", lambda: text)
    assert Bert(TINY, held_out=16).data != tiny.data


TABLES = sorted(COMMITTED.glob("*/tuned/*.csv"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_a_committed_table_is_complete_or_can_be_continued(tmp_path, table):
    """With every run in its place, or of the same plan."""
    workload = WORKLOADS[table.stem]
    if any(cell.left for cell in cells_of(workload, read(table, Row)).values()):
        path = tmp_path / "copy.json"
        path.write_text(table.with_suffix(".json").read_text())
        record(path, workload)


# The intervals ------------------------------------------------------------------------------------


def test_intervals_are_those_of_student_for_pairs():
    """Seeds that differ by 1 do not hide a difference of 0.01 that all of them have."""
    base = {3: 2.0, 4: 3.0, 5: 4.0, 6: 2.5, 7: 3.5}
    same = difference({seed: loss - 0.01 for seed, loss in reversed(base.items())}, base)
    assert_allclose(same, (-0.01, -0.01, -0.01), atol=1e-9)
    assert same.is_clear
    apart = np.array([-0.3, 0.1, -0.2, -0.15, -0.1])
    own = difference(dict(enumerate(2 + apart)), dict.fromkeys(range(5), 2.0))
    interval = scipy.stats.ttest_1samp(apart, 0).confidence_interval()
    assert_allclose(own, (apart.mean(), *interval), 1e-4)
    assert not own.is_clear
    assert str(own) == "-0.130 (-0.314 to +0.054)"
    with pytest.raises(ValueError, match="seeds must be the same"):
        difference({1: 2.0, 2: 3.0}, {1: 2.0, 3: 3.0})
    diverged = difference({0: math.inf, 1: 2.0}, {0: 2.0, 1: 2.0})
    assert diverged == (math.inf, -math.inf, math.inf)
    assert not diverged.is_clear


# The report ---------------------------------------------------------------------------------------


def test_the_tables_say_what_was_run(rows):
    found = results.measured(KNOWN, rows)
    own = found["adamw"]["32"]
    assert own.mean == np.mean([known_losses("adamw", own.settings, s).test for s in (3, 4, 5, 6)])
    text = tables.losses_table(KNOWN, found)
    assert f"{own.mean:.3f}" in text
    assert "32, 4 steps" in text
    apart = difference(found["muonh"]["32"].losses, own.losses)
    assert str(apart) in tables.differences_table(KNOWN, found, "adamw")
    assert ", ".join(f"{loss:.3f}" for loss in own.losses.values()) in tables.settings_table(found)
    apart = difference(found["adamw"]["64"].losses, own.losses)
    assert str(apart) in tables.ramps_table(KNOWN._replace(is_ramp=True), found)


def test_a_cell_counts_when_its_budget_is_spent(rows):
    own = of(rows, optimizer="adamw", batches="64")
    assert "adamw" not in results.measured(KNOWN, own[: HASTY.runs - 1])
    assert "adamw" in results.measured(KNOWN, own[: HASTY.runs])
    assert not results.curves(KNOWN, own[:-1], "64", "rate")
    curve = results.curves(KNOWN, own, "64", "rate")["adamw"]
    assert len(curve.losses) == 1 + len(search.FACTORS)
    seeds = HASTY.final_seeds[: HASTY.around]
    chosen = results.measured(KNOWN, own)["adamw"]["64"].settings
    assert curve.chosen == chosen.learning_rate
    expected = np.mean([known_losses("adamw", chosen, seed).test for seed in seeds])
    assert_allclose(curve.losses[curve.chosen], expected)


def test_the_report_and_its_pictures(tmp_path, rows):
    parts = report.section(KNOWN, rows, tmp_path)
    assert f"{HASTY.runs} runs for each optimizer" in parts[1]
    assert {path.name for path in tmp_path.glob("*.png")} == {"known.png", "known_around_64.png"}
    assert report.section(KNOWN, [], tmp_path) == []


def test_colours_of_any_optimizers_differ_and_ours_stay():
    colours = colours_of(["muonh", *(f"own_{number}" for number in range(7))])
    assert len(set(colours.values())) == 8
    assert colours["muonh"] == COLOURS["muonh"]


# The runs -----------------------------------------------------------------------------------------


def test_text_has_each_file_once_and_no_file_in_two_parts(tmp_path, monkeypatch):
    contents = {f"module_{index}": f"# file {index}\n".encode() * 3 for index in range(64)}
    others = {
        "package": contents["module_0"],
        "site-packages": b"# of another package",
        "test": b"# often not installed",
    }
    for folder, content in (contents | others).items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file.py").write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    parts = {name: text.tobytes() for name, text in bert.library_text.__wrapped__().items()}
    assert sum(map(len, parts.values())) == sum(map(len, contents.values()))
    for content in contents.values():
        assert sorted(text.count(content) for text in parts.values()) == [0, 0, 1]


def test_steps_of_a_plan():
    plan = schedule(32, 512, "0:32 128:64")
    steps = steps_of(plan)
    assert steps.start[: plan.total_steps].tolist() == [0, 32, 64, 96, 128, 192, 256, 320, 384, 448]
    assert steps.batch_size[: plan.total_steps].tolist() == [32] * 4 + [64] * 6
    assert_allclose(steps.learning_rate[3], plan.learning_rate(3))
    assert_allclose(steps.weight_decay[5], plan.weight_decay(5))


TINY = causal.SMALL._replace(layers=2, width=8, length=8)


@pytest.fixture(scope="module")
def tiny():
    return causal.CausalModel(TINY, held_out=16)


@pytest.mark.slow
def test_layers_that_are_scanned_or_fused_are_the_same_model(tiny):
    """The causal model scans its layers, too."""
    apart, scanned = (Bert(TINY._replace(stacked=own), held_out=16) for own in (False, True))
    fused, key = FusedModel(TINY, held_out=16), jax.random.key(0)
    for models in ((apart, scanned), (tiny, fused)):
        losses = [model.loss(model.init(key), models[0].test) for model in models]
        assert_allclose(*losses, rtol=1e-5)
    params = scanned.init(key)
    assert params["layers"]["query"]["kernel"].shape == (2, 8, 8)
    assert (0,) in scanned.stacked.axes(params)
    assert fused.init(key)["layers"]["qkv"]["kernel"].shape == (2, 8, 24)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [causal.CausalModel, Bert])
def test_only_the_causal_model_is_blind_to_what_follows(kind):
    network = kind(TINY, held_out=16)
    params = jax.jit(network.init)(jax.random.key(1))
    hidden = jax.jit(network.hidden)
    tokens = jax.numpy.arange(8)[None]
    own, other = hidden(params, tokens), hidden(params, tokens.at[0, 5].set(77))
    assert not np.allclose(own[0, 5:], other[0, 5:])
    assert np.array_equal(own[0, :5], other[0, :5]) == network.causal


def test_no_digit_is_in_two_parts(monkeypatch):
    monkeypatch.setattr(digits.Digits, "_noisy", lambda self, key, chosen: {*chosen.tolist()})
    task = digits.Digits()
    drawn = set().union(*(task.examples(jax.random.key(0), start) for start in range(500)))
    assert min(drawn) == 0
    assert max(drawn) < min(task.validation) <= max(task.validation) < min(task.test)
    assert max(task.test) == len(task.labels) - 1


def test_where_a_move_starts():
    losses = {0.1: 2.04, 0.2: 2.0, 0.4: 2.02, 0.8: 2.2}
    trials = {Settings(0, rate, 0, 0.9): loss for rate, loss in losses.items()}
    found = results.Measured(Settings(0, 0.2, 0, 0.9), trials, {}, False)
    ways = ("law", "lowest rate", "highest rate", "settled 4")
    starts = [transfer.start(found, way, 10_000).learning_rate for way in ways]
    assert starts == [0.2, 0.1, 0.4, 0.02]


@pytest.mark.slow
def test_runs_side_by_side_are_the_runs(tiny, monkeypatch):
    """As on a GPU: three at a time, the last of five filled up, gradients of more examples."""
    plan = schedule(32, 1024, "0:64 512:128")
    jobs = [(Settings(0, 0.1, 0.0, 0.7 + seed / 20), seed) for seed in range(5)]
    apart = list(compiled(tiny, ARMS["muonh"], 1)(plan, jobs))
    monkeypatch.setattr(training.jax, "default_backend", lambda: "gpu")
    together = list(compiled(tiny, ARMS["muonh"], 3)(plan, jobs))
    assert_allclose(together, apart, rtol=1e-3)
    assert len(set(apart)) == 5


@pytest.mark.slow
def test_a_momentum_that_follows_the_batch(tiny):
    """With the floor of the law; a batch that does not grow moves nothing."""
    ramp, constant = schedule(32, 512, "0:32 128:128"), schedule(32, 512)
    steps = steps_of(ramp, momentum_moves=True)
    assert steps.growth[: ramp.total_steps].tolist() == [1] * 4 + [4] * 3
    job = (Settings(0, 0.1, 0.0, 0.9), 3)
    moves, stays = (compiled(tiny, ARMS["muonh"], 1, own) for own in (True, False))
    assert list(moves(ramp, [job])) != list(stays(ramp, [job]))
    assert_allclose(*(list(run(constant, [job])) for run in (moves, stays)), rtol=1e-4)
