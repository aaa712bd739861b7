"""What a table of runs was made with, beside it: machine, versions, commands, plan."""

import datetime
import fcntl
import json
import os
from pathlib import Path
import platform
import shlex
import sys
from typing import Any

from benchmarks.harness.machine import machine, processor
from benchmarks.tuned.workloads import Workload


def record(path: Path, workload: Workload) -> None:
    """Notes this run; refuses to continue one with another plan.

    A plan may get more optimizers and batch sizes: what has been run stays as it is.
    """
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # pieces may run side by side
        file.seek(0)
        noted = _noted(file.read(), path, workload)
        file.truncate(0)
        file.write(json.dumps(noted, indent=2) + "\n")


def _noted(text: str, path: Path, workload: Workload) -> dict[str, Any]:
    """What is noted, and this run."""
    noted = json.loads(text) if text else {"plans": {}, "runs": []}
    before = noted["plans"].get(workload.name, workload.plan)
    changed = [key for key, now in workload.plan.items() if not _continues(before.get(key), now)]
    if changed:
        raise ValueError(
            f"{path} is of another plan of {workload.name}: {', '.join(changed)} changed. "
            f"Choose another --output, or remove that one."
        )
    noted["plans"][workload.name] = workload.plan
    data = workload.task().data
    if others := {run["data"] for run in noted["runs"] if "data" in run} - {data}:
        raise ValueError(
            f"{path} has runs on other data: {', '.join(others)}, and this machine has {data}. "
            f"Choose another --output."
        )
    noted["runs"].append(
        {
            "data": data,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", *sys.orig_argv[1:]]),
            "machine": machine(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
    )
    return noted


def _continues(before: Any, now: Any) -> bool:
    """Whether an entry of a plan is what it was, or that and more."""
    if isinstance(before, dict) and isinstance(now, dict):
        return before.items() <= now.items()
    return before == now
