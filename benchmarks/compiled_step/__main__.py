"""Whole steps as XLA compiles them for GPUs and TPUs, on any machine.

    python -m benchmarks.compiled_step
    python -m benchmarks.compiled_step --target "one H100" --case bert-base --optimizer lamb lans

Everything here is compiled and nothing is timed. A step is `update` and `apply_updates`, with
parameters and state donated. Bytes are what kernels read from and write to the memory of a device,
for each of its own parameters; what a TPU keeps on its chip is not counted. On one GPU the passes
over a leaf follow each other if other kernels move less than `NEAR` bytes between them. Writes
`compiled_step.csv`. With `--check` it ends with an error if a step is worse
than `limits.py` says.
"""

import argparse
import time
from typing import Any

import jax
from tqdm import tqdm

from benchmarks.compiled_step.cases import CASES, OURS
from benchmarks.compiled_step.limits import failures
from benchmarks.compiled_step.program_text import Program
from benchmarks.compiled_step.targets import TARGETS
from benchmarks.harness.machine import versions
from benchmarks.harness.results import add_output, report, write_csv
from benchmarks.harness.steps import updated

NEAR = 50 * 2**20
"""The cache of an H100."""

LARGE = 2**20
"""The bytes of a gradient from which its passes should follow each other."""

SHORT = [
    *(
        (target, "two layers", name)
        for target in ("one H100", "eight H100", "one v5e", "v5e 2x4")
        for name in OURS
    ),
    ("one H100", "300 small leaves", "scaled_adam"),
    ("one H100", "two layers", "adamh"),
    ("one H100", "two layers", "muonh, bfloat16"),
]

SEVERAL = ("bert-base", "bert-base, specs", "1.3B, stacked")
"""The networks that are not, or not only, for one H100."""

CELLS = [
    *((target, "bert-base") for target in ("one H100", "eight H100", "one v5e", "v5e 2x4")),
    *((target, "1.3B, stacked") for target in ("one H100", "eight H100", "v5e 2x4", "v5e 16x16")),
    *((target, "bert-base, specs") for target in ("eight H100", "v5e 2x4")),
    *((target, "bert-base") for target in ("one v6e", "one v5p")),
    *((target, "1.3B, stacked") for target in ("v6e 2x4", "v5p 2x2x2")),
    *(("one H100", name) for name in CASES if name not in SEVERAL),
]
"""What is compiled unless something else is asked for; 1.3B are too many for one v5e."""


def measure(target_name: str, case_name: str, name: str) -> dict[str, Any]:
    """A row of the table: one optimizer's step for one target."""
    target, case = TARGETS[target_name], CASES[case_name]
    params, state, gradients, optimizer = case.arguments(name)
    own_parameters = sum(x.size for x in jax.tree.leaves(params)) / target.number
    leaves = len(jax.tree.leaves(params))

    arguments = target.placed((params, state, gradients))
    # Between two steps of training everything stays where it is.
    own = jax.tree.map(lambda x: x.sharding, arguments[:2])
    extra = {"partition_specs": own[0]} if case.told else {}

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        return updated(optimizer, gradients, params, state, **extra)

    start = time.process_time()
    lowered = jax.jit(step, donate_argnums=(0, 1), out_shardings=own).lower(*arguments)
    traced = time.process_time()
    compiled = lowered.compile()
    done = time.process_time()
    program = Program(compiled.as_text())
    cost = program.cost()
    apart = [x > NEAR for x in program.bytes_between_passes(LARGE)]
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    parameter_bytes = jax.tree.leaves(params)[0].dtype.itemsize * own_parameters
    return {
        "target": target_name,
        "case": case_name,
        "optimizer": name,
        "kernels": cost.kernels,
        "kernels_for_each_leaf": round(cost.kernels / leaves, 2),
        "calls_of_cublas": compiled.as_text().count('custom_call_target="__cublas'),
        "bytes_for_each_parameter": round(cost.bytes / own_parameters, 2),
        "floor": case.floors.get(name, ""),
        "bytes_between_steps": round(program.cost(branch=False).bytes / own_parameters, 2),
        "temporaries_percent": round(100 * temporaries / parameter_bytes, 2),
        "passes_far_apart": sum(apart) if target == TARGETS["one H100"] else "",
        "collectives": " ".join(f"{kind}:{n}" for kind, n in program.collectives.items()),
        "trace_cpu_s": round(traced - start, 2),
        "compile_cpu_s": round(done - traced, 2),
        "versions": versions(),
    }


def optimizers_of(case: str) -> list[str]:
    """AdamW and ours; of the first network those of optax and AdamH too."""
    if CASES[case].told:
        return [*OURS]
    more = []
    if case == "bert-base":
        more = ["optax.lamb", "optax.lars", "adamh", "muon, bfloat16", "muonh, bfloat16"]
    return ["optax.adamw", *more, *OURS]


def main() -> None:
    """Compiles and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS)
    parser.add_argument("--case", nargs="+", choices=CASES)
    parser.add_argument("--optimizer", nargs="+", help="default: those of each case")
    parser.add_argument("--short", action="store_true", help="two layers of BERT, a minute")
    parser.add_argument("--check", action="store_true", help="compare with limits.py")
    add_output(parser, "compiled_step")
    args = parser.parse_args()
    if args.short:
        cells = SHORT
    else:
        pairs = [
            (target, case)
            for target in args.target or TARGETS
            for case in args.case or CASES
            if (args.target and args.case) or (target, case) in CELLS
        ]
        cells = [
            (target, case, name)
            for target, case in pairs
            for name in args.optimizer or optimizers_of(case)
        ]
    for name in {target for target, *_ in cells if not TARGETS[target].is_available}:
        print(f"{name}: left out, its compiler is not installed (`make compilers`)")
    cells = [cell for cell in cells if TARGETS[cell[0]].is_available]
    rows = []
    progress = tqdm(cells, desc="compiling")
    for cell in progress:
        progress.set_postfix_str(", ".join(cell))
        rows.append(measure(*cell))
        write_csv(rows, args.output / "compiled_step.csv")
    if not rows:
        return
    report(rows, args.output / "compiled_step.csv")
    if args.check and (worse := failures(rows)):
        raise SystemExit("worse than limits.py allows:\n" + "\n".join(worse))


if __name__ == "__main__":
    main()
