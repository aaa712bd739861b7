"""A printed plan has at most 80 columns, whatever its numbers are."""

import re

import optax_largebatch as lb


def falling(first):
    """A schedule whose values need many digits."""
    return lambda seen: first / (1 + seen)


def test_a_table_that_is_too_wide_is_written_shorter():
    """First integers with a unit, and then schedules without their last value in a stage."""

    def last_stage(learning_rate):
        run = lb.TunedRun(
            "adamw", batch_size=8, total=10**18, learning_rate=learning_rate,
            weight_decay=falling(1.234e-3),
        )  # fmt: skip
        starts = [(0, 2**30), (10**16, 2**30 + 1024)]
        plan = lb.batch_plan(starts, total=10**18, run=run, law="kept", micro_batch_size=1)
        return re.split("  +", str(plan).splitlines()[3])

    slow = "1.23e-19 to 1.23e-21"
    exact = ["9313226", "1073742848", "1073742848", "1e+04T"]
    short = ["9.313M", "1.074B", "1.074B", "1e+04T"]
    assert last_stage(0.1) == [*exact, "0.1", slow, "0.9"]
    assert last_stage(lambda seen: 0.123) == [*short, "0.123 to 0.123", slow, "0.9"]
    assert last_stage(falling(1.234)) == [*short, "from 1.23e-16", "from 1.23e-19", "0.9"]


def test_a_reason_that_is_long_goes_on_in_the_next_line():
    run = lb.TunedRun("adamw", batch_size=2**20, total=10**9, learning_rate=1.2345e-9, b1=0.0001234)
    lines = str(lb.batch_plan(64, total=10**9, run=run)).splitlines()
    (row,) = [k for k, line in enumerate(lines) if line.startswith("  b2 ")]
    assert lines[row].endswith("same half-life in examples, at most")
    assert lines[row + 1].split() == ["0.9999"]
    assert lines[row + 1].index("0") == lines[row].index("same")
