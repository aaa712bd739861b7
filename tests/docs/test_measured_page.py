"""The page of measurements says what the committed results say."""

import re

from docs.write_measured import DOCS, read
import optax_largebatch as lb

PAGE = (DOCS / "measured.md").read_text()


def cells(begin):
    """The numbers of the row that begins like this, the first of each cell."""
    (row,) = re.findall(rf"^\| {re.escape(begin)} \| (.+) \|$", PAGE, re.MULTILINE)
    return [float(cell.split(" ")[0]) for cell in row.split(" | ") if cell]


def test_the_sentences_on_what_falls_short_say_what_the_tables_say():
    text = " ".join(PAGE.split())
    _, lamb, lans, _, _ = map(round, cells("300 small arrays"))
    assert f"LAMB moves {lamb} bytes and LANS {lans}, where" in text
    *_, lars, temporaries = map(round, cells("`accumulate_gradients`, every=8"))
    assert f"LARS moves {lars} of 52" in text
    assert temporaries == 21
    lans, lamb = longer_to_compile()
    assert f"LANS compiles {lans} times as long as AdamW, LAMB {lamb} times" in text
    cases = ("bert-base", "bert-base, specs")
    without, with_specs = (kernels_on_eight_gpus(case) for case in cases)
    assert f"LAMB, LANS and LARS have {without} kernels for each array;" in text
    assert f"with `partition_specs` they have {with_specs}." in text


def compiled(target, case):
    """What was compiled, by optimizer."""
    rows = read("compiled/compiled_step.csv")
    return {row["optimizer"]: row for row in rows if (row["target"], row["case"]) == (target, case)}


def kernels_on_eight_gpus(case):
    """The kernels for each array of LAMB, LANS and LARS, as a sentence lists them."""
    rows = compiled("eight H100", case).items()
    kernels = {name: round(float(row["kernels_for_each_leaf"]), 1) for name, row in rows}
    return "{lamb}, {lans} and {lars}".format(**kernels)


def longer_to_compile():
    """How many times as long as AdamW LANS and LAMB take to be traced and compiled."""
    rows = compiled("one H100", "bert-base").items()
    seconds = {name: float(row["trace_cpu_s"]) + float(row["compile_cpu_s"]) for name, row in rows}
    assert round(seconds["lans"]) == 12
    return [f"{seconds[name] / seconds['optax.adamw']:.1f}" for name in ("lans", "lamb")]


def test_the_status_says_what_has_only_been_compiled():
    """Of a GPU or a TPU there is no time: whoever times one takes this sentence out."""
    status = (DOCS / "stability.md").read_text().partition("## Status")[2].partition("\n## ")[0]
    assert "compiled, never run" in status


def test_what_is_said_of_muon_on_meshes_is_what_was_compiled():
    rows = read("compiled/compiled_muon.csv")
    found = {(row["case"], row["optimizer"]): row for row in rows if row["target"] == "eight H100"}
    page = " ".join((DOCS / "algorithms" / "muonh.md").read_text().split())
    rows = [("BERT-large stacked, rows", name) for name in ("muonh", "muon")]
    told = zip(rows, re.findall(r"moves (\d+\.\d)", page), strict=True)
    for row, said in told:
        assert said == f"{float(found[row]['bytes_for_each_parameter']):.1f}"
    rows = [("24 layers stacked, rows over 4 x 2", name) for name in ("muon, no specs", "muon")]
    of_memory = [float(found[row]["temporaries_of_own_parameters"]) for row in rows]
    doc = " ".join(lb.muon.__doc__.split())
    assert re.findall(r"(\d+\.\d) times", doc) == [f"{x:.1f}" for x in of_memory]
