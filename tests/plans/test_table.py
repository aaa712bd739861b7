"""A printed plan has at most 80 columns, and says its rates and its time."""

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


def shown(batch, total, **lengths):
    rate = lb.PlannedRate(3e-4, warmup="1M")
    run = lb.TunedRun("adamw", batch_size=512, total="50M", learning_rate=rate, weight_decay=0.01)
    return str(lb.batch_plan(batch, total=total, run=run.to("muonh"), **lengths))


def test_the_peak_of_a_stage_is_in_its_row():
    """And there is one rate under each name, also where the last stage begins after the peak."""
    alone = shown(16_384, "50M")
    assert "   0  16384         0  0 to 0.0098 to " in alone
    assert "  peak rate      0.001732 -> 0.009798   times sqrt(k)\n" in alone
    ramp = shown("0:512 10M:16384", "50M")
    rows = [re.split("  +", line.strip()) for line in ramp.splitlines()[2:4]]
    assert rows[0][3] == "0 to 0.00173 to 0.00159"
    assert rows[1][3].startswith("0.009 to ")
    assert "  peak rate      0.001732 -> 0.009798   times sqrt(k); reaches 0.009\n" in ramp
    for text in (alone, ramp):
        assert "  rate of Adam   0.0003997 -> 0.002261  0.231 of it" in text
        assert "at most" not in text.replace("at least", "")


def test_the_last_lines_say_the_time():
    """On the same devices, on the fewest (a power of two) on which it is less, and on all."""

    def time(*numbers, **lengths):
        return " ".join(shown(*numbers, **lengths).split("  ")[-1].splitlines()[-2:])

    assert time(16_384, "75M").endswith(
        "75M examples in place of 50M: at best 1.5x the time on the same devices, 0.75x on 2x as "
        "many, 0.0469x on 32x as many."
    )
    # 2.2 times the examples take 1.1 times as long on twice as many devices.
    assert "2.2x the time on the same devices, 0.55x on 4x as many, 0" in time(16_384, "110M")
    # The first half of the examples has batches that only the devices of before can share.
    assert "1x the time on the same devices, 0.75x on 2x as many, 0.563x on 8x as many." in time(
        "0:512 25M:4096", "50M"
    )
    # It never pays.
    assert "3x the time on the same devices, 1.5x on 2x as many." in time(1024, "150M")
    # A batch on fewer devices than before.
    assert "50M examples: at best 1x the time on the same devices." in time(256, "50M")
    assert "time" not in time(512, "50M")
    tokens = shown(1024, "100M", sequence_length=10)
    assert "100M tokens in place of 50M: at best 2x the time on the same devices, 1x on" in tokens


def test_a_plan_without_a_run_is_compared_with_its_first_batch():
    text = str(lb.batch_plan("0:256 500k:1024", total="1M"))
    assert "2443 steps for 1M examples; a constant batch of 256 takes 3907." in text
    assert "1M examples: at best 1x the time on the same devices, 0.75x on 2x as many" in text
    assert "time" not in str(lb.batch_plan(256, total="1M"))
