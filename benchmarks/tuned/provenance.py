"""What a table of trials was made with, beside it: machine, versions, commands, plan."""

from collections.abc import Sequence
import datetime
import json
import os
from pathlib import Path
import platform
import shlex
import sys
from typing import Any, Protocol

from benchmarks.harness.machine import machine

MAY_GROW = ("batch_sizes", "centres_of_learning_rate")


class Planned(Protocol):
    """A workload, as far as it matters here."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def plan(self) -> dict[str, Any]:
        """The settings that must not change when a sweep is continued."""
        ...


def record(
    path: Path, workloads: Sequence[Planned], package: str = "benchmarks.batch_size_curve"
) -> None:
    """Notes this run; refuses to continue one with another plan.

    A plan may get more optimizers and batch sizes: what has been run stays as it is.
    """
    noted = json.loads(path.read_text()) if path.exists() else {"plans": {}, "runs": []}
    for workload in workloads:
        before = noted["plans"].get(workload.name, workload.plan)
        changed = [key for key in workload.plan if not _holds(before, workload.plan, key)]
        if changed:
            raise ValueError(
                f"{path} is of another plan of {workload.name}: {', '.join(changed)} changed. "
                f"Choose another --output, or remove that one."
            )
        noted["plans"][workload.name] = workload.plan
    noted["runs"].append(
        {
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", package, *sys.argv[1:]]),
            "machine": machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
    )
    path.write_text(json.dumps(noted, indent=2) + "\n")


def _holds(before: dict[str, Any], now: dict[str, Any], key: str) -> bool:
    """Whether an entry of a plan is what it was, or that and more where that is allowed."""
    old, new = before.get(key), now[key]
    if key not in MAY_GROW or old is None:
        return old == new
    if isinstance(new, dict):
        return old.items() <= new.items()
    return set(old) <= set(new)
