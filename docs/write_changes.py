"""Writes the table of the page on changing a run: what each change costs with each optimizer.

python docs/write_changes.py
"""

from collections.abc import Callable, Mapping
from pathlib import Path
import sys

import jax

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from benchmarks.harness.pages import markdown, with_tables  # noqa: E402
from tests.conftest import enable_x64  # noqa: E402
from tests.migration.changes import OPTIMIZERS, cost  # noqa: E402

WORDS = {
    "devices": ("8 devices, 2, and 8 again", "put the checkpoint on the new ones"),
    "mesh": ("data, then FSDP x tensor", "the same, by `lb.optimizer_state_shardings`"),
    "micro-batches": ("micro-batches", "adopt into `lb.accumulate_gradients(...)`"),
    "batch stage": ("a stage of the batch", "adopt into the plan's optimizer"),
    "stacked, and apart": ("layers stacked, and apart", "`convert=stack`, `stacked=`"),
    "split, and joined": ("QKV split, and joined", "`convert=split`, with a text"),
    "new head": ("a new head, more words", '`convert=grown`, `forget=lb.matching("head")`'),
    "masters": ("bfloat16 with masters, and back", "`old_params=`, then the masters"),
    "to MuonH": ("to MuonH", "adopt into `lb.muonh(...)`"),
    "to AdamW": ("to AdamW", "adopt into `optax.adamw(...)`"),
}
"""What changes, and what to do."""


def in_words(change: str) -> str:
    """What a change costs: first with most optimizers."""
    names: dict[str, list[str]] = {}
    with enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for name in OPTIMIZERS:
            in_short = cost(change, name, seeds=5).partition(":")[0]
            names.setdefault(in_short, []).append(name)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{', '.join(those)}: {in_short}" for in_short, those in names.items())


def table() -> str:
    """All changes."""
    return markdown(
        ["what changes", "what to do", "cost"],
        [[*words, in_words(change)] for change, words in WORDS.items()],
    )


PAGES: dict[str, dict[str, Callable[[], str]]] = {"guides/changing_a_run.md": {"changes": table}}


def written(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page as it should be."""
    return with_tables(page, "docs/write_changes.py", tables)


if __name__ == "__main__":
    jax.config.update("jax_numpy_rank_promotion", "allow")
    for path, tables in PAGES.items():
        page = DOCS / path
        page.write_text(written(page.read_text(), tables))
