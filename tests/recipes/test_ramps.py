"""Ramps of the batch size are as their sources give them."""

import pytest

import optax_largebatch as lb
from optax_largebatch import recipes
from optax_largebatch.plans.law import LAWS
from optax_largebatch.recipes import batch_ramps
from optax_largebatch.recipes.catalogue import published
from tests.plans import runs

NAMES = recipes.names("ramps")
GIVEN = {"increment": 768, "total": "10.4T"}
"""What tests give in place of what a source does not say."""
UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def tuned(batch_size, **numbers):
    return runs.tuned(1.0, batch_size, "1T", **numbers)


def given(name, **settings):
    return {said: GIVEN[said] for said in published()[name].get("not_said", ())} | settings


def number(text):
    unit = text[-1] if text[-1] in UNITS else ""
    return round(float(text.removesuffix(unit)) * UNITS[unit])


def megatrons_linear_rule(start, increment, samples, last):
    """Megatron's `RampupBatchsizeNumMicroBatchesCalculator`, in samples."""
    per_increment = samples / ((last - start) // increment)

    def batch_size(step, consumed):
        if consumed > samples:
            return last
        return start + int(consumed / per_increment) * increment

    return batch_size


def megatrons_listed_rule(schedule, length):
    """Megatron's `StepBatchsizeNumMicroBatchesCalculator`, with thresholds in tokens."""
    pairs = [entry.split(":") for entry in schedule.split()]
    thresholds = [(number(seen) // length, int(batch)) for seen, batch in pairs]

    def batch_size(step, consumed):
        return [batch for seen, batch in thresholds if consumed >= seen][-1]

    return batch_size


def palms_rule(step, consumed):
    return 512 if step < 50_000 else 1024 if step < 115_000 else 2048


RUNS = {
    "bloom-176b": (megatrons_linear_rule(192, 16, 9_765_625, 2048), 220_000_000),
    "deepseek-v2": (megatrons_linear_rule(2304, 768, 225e9 / 4096, 9216), 8.1e12 / 4096),
    "deepseek-v3": (megatrons_linear_rule(3072, 768, 469e9 / 4096, 15360), 14.8e12 / 4096),
    "glm-4.5": (megatrons_linear_rule(4096, 768, 500e9 / 4096, 16384), 22e12 / 4096),
    "llama-3-405b": (megatrons_listed_rule("0:512 252M:1024 2.87T:2048", 8192), 15.6e12 / 8192),
    "minimax-01": (
        megatrons_listed_rule("0:2048 69B:4096 790B:8192 4.7T:16384", 8192),
        10.4e12 / 8192,
    ),
    "olmo-1b": (megatrons_listed_rule("0:1024 168B:2048 503B:4096", 4096), 608e9 / 4096),
    "palm-540b": (palms_rule, 50_000 * 512 + 65_000 * 1024 + 140_000 * 2048),
    "gpt-3/megatron": (
        megatrons_listed_rule("0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536", 2048),
        649_446_688,
    ),
    "nanochat-d34": (  # 3% and 10% of the tokens
        megatrons_listed_rule("0:128 312B:256 1.04T:512", 2048),
        10.4e12 / 2048,
    ),
}
"""The rule of each run, and its number of sequences."""


@pytest.mark.parametrize("name", NAMES)
def test_takes_the_steps_of_the_source(name):
    batch_size, sequences = RUNS[name]
    plan = recipes.ramp(name, **given(name))
    edges = [stage.first_step for stage in plan.stages[1:]]
    # The rules never fall: a batch size that is the same later is the same in between.
    for step in (0, *edges, *(edge - 1 for edge in edges), plan.total_steps - 1):
        assert plan.batch_size(step) == batch_size(step, plan.examples_at(step))
    assert plan.examples_at(plan.total_steps - 1) < sequences
    assert 0 <= plan.examples - sequences < 1


def test_a_linear_ramp_of_broken_widths_keeps_the_edges(monkeypatch):
    """Stages of 3.33 sequences: three are not enough, and the steps do end at three and at six."""
    entry = published()["bloom-176b"] | {
        "sequence_length": 1, "total": 14,
        "linear": {"first": 1, "last": 4, "increment": 1, "length": 10},
    }  # fmt: skip
    monkeypatch.setattr(batch_ramps, "find", lambda name: entry)
    batch_size = megatrons_linear_rule(1, 1, 10, 4)
    plan, consumed = recipes.ramp("bloom-176b"), 0
    for step in range(plan.total_steps):
        assert plan.batch_size(step) == batch_size(step, consumed)
        consumed += plan.batch_size(step)
    assert [stage.first_example for stage in plan.stages] == [0, 4, 8, 11]


@pytest.mark.parametrize(("total", "step"), [(8_738_133, 1), (8_738_134, 2)])
def test_percents_of_an_odd_total_keep_the_edge(total, step):
    """3% of the first is 0.01 tokens less than one batch, and of the second 0.02 tokens more."""
    plan = recipes.ramp("nanochat-d34", total)
    assert plan.batch_size(0) == 128
    assert plan.stages[1][:2] == (step, 128 * step)


def test_figures_of_the_sources():
    # Section 4.3 of OLMo's paper, with the annealing: 43% fewer steps than with 1024.
    with_annealing = recipes.ramp("olmo-1b", "658B")
    assert 1 - with_annealing.total_steps / (658e9 / 4096 / 1024) == pytest.approx(0.43, abs=0.005)
    # nanochat's pull request: about 16% more steps than at the full batch.
    nanochat = recipes.ramp("nanochat-d34", "50B")
    assert nanochat.total_steps / (50e9 / 2048 / 512) == pytest.approx(1.16, abs=0.005)
    assert [stage.batch_size * nanochat.sequence_length for stage in nanochat.stages] == [
        256 * 1024,
        512 * 1024,
        1024 * 1024,
    ]
    # PaLM: 780 billion tokens.
    palm = recipes.ramp("palm-540b")
    assert palm.examples * palm.sequence_length == pytest.approx(780e9, rel=0.01)
    assert palm.total_steps == 255_000
    # BLOOM's README: 450 billion tokens, 102,000 steps of them at the last batch size.
    bloom = recipes.ramp("bloom-176b")
    assert bloom.examples * bloom.sequence_length == pytest.approx(450e9, rel=0.002)
    assert bloom.total_steps - bloom.stages[-1].first_step == pytest.approx(102e3, rel=0.01)
    assert len(bloom.stages) == 117
    assert recipes.ramp("gpt-3/megatron").total_steps == 500_000


@pytest.mark.parametrize("name", NAMES)
def test_the_data_are_whole(name):
    entry = published()[name]
    needed = {"name", "field", "task", "source", "note", "sequence_length", "law"}
    assert needed <= set(entry) <= needed | {"not_said", "total", "stages", "linear", "counted_in"}
    assert ("stages" in entry) != ("linear" in entry)
    assert entry["law"] in LAWS
    assert entry.get("counted_in", "percent") == "percent"
    missing = {
        said for said in ("total", "increment") if said not in entry | entry.get("linear", {})
    }
    if "linear" not in entry:
        missing -= {"increment"}
    assert missing == set(entry.get("not_said", ()))
    assert "arXiv" in entry["source"] or "@" in entry["source"]
    assert entry["note"].endswith(".")


def test_the_plan_names_run_and_source():
    plan = recipes.ramp("palm-540b")
    assert plan.note.startswith("PaLM 540B, 255,000 steps; arXiv 2204.02311, section 5.")


def test_the_rate_follows_as_in_the_run():
    olmo = recipes.ramp("olmo-1b", run=tuned(1024))
    assert [float(olmo.learning_rate(step)) for step in (0, 40_055, 79_990)] == pytest.approx(
        [1.0, 2**0.5, 2.0]
    )
    palm = recipes.ramp("palm-540b", run=tuned(512))
    assert float(palm.learning_rate(200_000)) == 1.0
    coupled = recipes.ramp("palm-540b", run=tuned(512), law="sqrt")
    assert float(coupled.learning_rate(200_000)) == pytest.approx(2.0)


def test_another_total():
    shorter = recipes.ramp("olmo-1b", "550B")
    assert shorter.stages == recipes.ramp("olmo-1b").stages
    assert shorter.examples == 134_277_344
    starts = [
        [stage.first_example for stage in recipes.ramp("nanochat-d34", total).stages]
        for total in ("10B", "100B")
    ]
    for short, long in zip(*starts, strict=True):
        assert 10 * short == pytest.approx(long, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_prints_in_80_columns(name):
    plan = recipes.ramp(name, **given(name, run=tuned(512, weight_decay=0.1), devices=16))
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 40
    assert lb.BatchPlan.from_json(plan.to_json()) == plan


def test_a_long_plan_leaves_out_stages():
    lines = str(recipes.ramp("bloom-176b")).splitlines()
    assert lines[10] == "... 101 more stages ..."
    assert lines[9].split()[1] == "304"
    assert lines[11].split()[1] == "1936"
    assert lines[18].split()[1] == "2048"


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("olmo-7b", {}, r"got 'olmo-7b'\. Near it are olmo-1b"),
        ("?", {}, r"Near it are none; recipes\.table\(\) has all names"),
        ("minimax-01", {}, r"^total must be given for 'minimax-01'.*arXiv 2501\.08313"),
        ("glm-4.5", {}, r"^increment must be given for 'glm-4\.5'"),
        ("glm-4.5", {"increment": 1000}, r"must divide 12288, .*\(4096 to 16384\); got 1000"),
        ("olmo-1b", {"increment": 8}, r"^increment must be None for 'olmo-1b', .*; got 8"),
        ("olmo-1b", {"total": "100B"}, r"^stages must all begin before the end"),
    ],
)
def test_errors_say_what_is_allowed(name, settings, error):
    with pytest.raises(ValueError, match=error):
        recipes.ramp(name, **settings)
