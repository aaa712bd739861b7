"""The committed programs of Muon are as good as they should be."""

import pytest

from benchmarks.compiled_muon import CASES, OPTIMIZERS, failures
from docs.write_measured import read

GATHERED = ("24 layers stacked, 4 x 2", "experts stacked, 2 x 2 x 2")
ROWS = read("compiled/compiled_muon.csv")


def test_what_is_committed_is_allowed():
    ours = [row for row in ROWS if row["optimizer"] in ("muon", "muon, bfloat16")]
    both = ("eight H100", "v5e 2x4")
    assert {(row["target"], row["case"]) for row in ours} == {
        (target, name)
        for name, case in CASES.items()
        for target in ((case.target,) if case.target else both)
    }
    assert not failures(ROWS)


@pytest.mark.parametrize(
    ("worse", "says"),
    [
        ({"collectives": "all-to-all:8"}, "allowed are 6 all-to-alls"),
        ({"collectives": "all-to-all:4 all-gather:1"}, "sends all-to-all:4 all-gather:1"),
        ({"temporaries_beyond_adamw": "2.2"}, "temporaries_beyond_adamw is 2.2"),
        ({"exchanges_during_products": "1 of 4"}, "multiplies during 1 of 4 exchanges"),
        ({"products_of_a_share": "1.23"}, "products_of_a_share is 1.23"),
        ({"collectives": "all-to-all:4 all-reduce:1"}, "allowed are 0 all-reduces"),
    ],
)
def test_what_is_worse_is_named(worse, says):
    (row,) = (
        row
        for row in ROWS
        if (row["target"], row["case"], row["optimizer"])
        == ("eight H100", "BERT-base, rows", "muon")
    )
    (line,) = failures([row | worse])
    assert says in line


def test_a_step_on_a_large_mesh_that_is_worse_is_named():
    large = [row for row in ROWS if len(CASES[row["case"]].axes) > 1]
    with_specs = [row for row in large if OPTIMIZERS[row["optimizer"]].told]
    ours = [row for row in large if row["optimizer"] in ("muon", "muon, no specs", "muonh")]
    assert with_specs
    for column, value, rows in (
        ("products_of_a_share", "4.5", with_specs),
        ("temporaries_of_own_parameters", "6.0", with_specs),
        ("largest_gathered", "1.0", [row for row in ours if row["case"] in GATHERED]),
    ):
        for row in rows:
            (line,) = failures([row | {column: value}])
            assert f"{column} is {value}" in line
