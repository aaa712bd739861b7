"""The guide on stacked layers says what its committed runs say."""

import statistics

from docs.write_measured import DOCS, read


def median_steps(name):
    """Of the runs of an optimizer with the deep BERT at batch 128."""
    cell = ["deep_bert", name, "128"]
    rows = read("cpu-2-cores/steps_to_a_target.csv")
    found = [row for row in rows if [row["workload"], row["optimizer"], row["batch_size"]] == cell]
    return statistics.median_low(float(row["steps"]) for row in found)


def test_layers_in_a_stack():
    names = ("lamb", "lamb_one_norm", "lans", "lans_one_norm")
    guide = (DOCS / "guides" / "stacked_layers.md").read_text()
    said = "{:.0f} steps there with a norm for each layer and {:.0f} with one for all, LANS {:.0f}"
    assert (said + " and {:.0f}").format(*map(median_steps, names)) in " ".join(guide.split())
    rows = read("cpu-2-cores/stack_ratios.csv")
    stacks = [[float(x) for name, x in row.items() if name.startswith("layer_")] for row in rows]
    widest = max(stacks, key=lambda ratios: max(ratios) / min(ratios))
    assert f"jnp.array([{', '.join(f'{ratio:.2f}' for ratio in widest)}])" in guide
