"""The engine's README.md says what each switch of a place is worth, as it was compiled."""

import re

from benchmarks.compiled_step.switches import PLANS, lines_of_readme, switches_of
from docs.write_measured import ROOT, read

ROWS = read("compiled/switches.csv")


def test_each_switch_that_is_on_was_compiled_without():
    found = {}
    for row in ROWS:
        step = (row["target"], row["case"], row["optimizer"])
        found.setdefault(step, []).append(row["without"])
    assert found == {step: ["", *switches_of(plan)] for step, plan in PLANS.items()}


def test_the_table_is_what_was_compiled():
    text = (ROOT / "optax_largebatch" / "engine" / "README.md").read_text()
    assert re.findall(r"^\| (?:one|eight|v\w+) .*\|$", text, re.MULTILINE) == lines_of_readme(ROWS)
