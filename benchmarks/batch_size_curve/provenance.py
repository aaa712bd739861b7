"""What a table of trials was made with, beside it: machine, versions, commands, plan."""

import datetime
import json
import os
from pathlib import Path
import platform
import shlex
import sys

from benchmarks.batch_size_curve.workloads import Workload
from benchmarks.harness.machine import machine


def record(path: Path, workloads: list[Workload]) -> None:
    """Notes this run; refuses to continue one with another plan."""
    noted = json.loads(path.read_text()) if path.exists() else {"plans": {}, "runs": []}
    for workload in workloads:
        before = noted["plans"].setdefault(workload.name, workload.plan)
        if before != workload.plan:
            changed = [key for key in workload.plan if before.get(key) != workload.plan[key]]
            raise ValueError(
                f"{path} is of another plan of {workload.name}: {', '.join(changed)} changed. "
                f"Choose another --output, or remove that one."
            )
    noted["runs"].append(
        {
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "benchmarks.batch_size_curve", *sys.argv[1:]]),
            "machine": machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
    )
    path.write_text(json.dumps(noted, indent=2) + "\n")
