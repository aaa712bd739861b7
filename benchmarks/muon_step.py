"""The time of Muon's step, beside that of `optax.contrib.muon`, in the same run.

    python -m benchmarks.muon_step
    python -m benchmarks.muon_step --layers 12 --width 768 --rounds 5

The step (update and `apply_updates`, donated) on a BERT, with its layers apart and stacked. Steps
are taken in turns, and each is compared with that of optax in the same round. The table also has
the multiplications and additions in products of matrices, divided by those of optax. Writes
`muon_step.csv`.
"""

import argparse
from typing import Any

import jax
import optax

from benchmarks.compiled_step.products import Products
from benchmarks.harness.machine import machine
from benchmarks.harness.results import add_output, report
from benchmarks.harness.steps import start_update
from benchmarks.harness.trees import arrays, bert, stacked_bert
from benchmarks.harness.turns import in_turns, ratio
import optax_largebatch as lb

MATRICES = ~lb.matching("embeddings")
PEER = "optax.contrib.muon"


def optimizers(stacked: bool) -> dict[str, optax.GradientTransformation]:
    """The optimizers, for the same matrices."""

    def numbers(params: Any) -> Any:
        def own(path: Any, x: Any) -> Any:
            of_block = x.ndim - (stacked and path[0].key == "layers")
            is_matrix = path[0].key != "embeddings" and of_block == 2
            return optax.contrib.MuonDimensionNumbers(-2, -1) if is_matrix else None

        return jax.tree_util.tree_map_with_path(own, params)

    stacks = lb.stacked_layers({"^layers/": 0}) if stacked else None
    return {
        PEER: optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers),
        "muon": lb.muon(1e-3, matrix_mask=MATRICES, stacked=stacks),
        "muon, Gram's form": lb.muon(1e-3, ns_gram=True, matrix_mask=MATRICES, stacked=stacks),
        "muonh": lb.muonh(1e-3, ns_coeffs="standard", matrix_mask=MATRICES, stacked=stacks),
    }


def measure(layers: int, width: int, stacked: bool, rounds: int) -> list[dict[str, Any]]:
    """The rows of one network."""
    network = stacked_bert(layers, width) if stacked else bert(layers, width)
    running = {
        name: start_update(optimizer, arrays(network), arrays(network))
        for name, optimizer in optimizers(stacked).items()
    }
    seconds = in_turns(running, rounds, description="stacked" if stacked else "apart")
    products = {name: Products(x.compiled.as_text()).operations for name, x in running.items()}
    return [
        {
            "layers": f"{layers} of width {width}, {'stacked' if stacked else 'apart'}",
            "optimizer": name,
            **ratio(steps, seconds[PEER]).as_row(2),
            "products": round(products[name] / max(products[PEER], 1), 3),
            "temporaries_mb": round(running[name].temporaries_bytes / 1e6, 1),
            "rounds": rounds,
            "machine": machine(),
        }
        for name, steps in seconds.items()
    ]


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=10)
    add_output(parser, "muon_step")
    args = parser.parse_args()
    rows = []
    for stacked in (False, True):
        rows += measure(args.layers, args.width, stacked, args.rounds)
    report(rows, args.output / "muon_step.csv")


if __name__ == "__main__":
    main()
