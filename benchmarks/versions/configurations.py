"""Configurations of the library, and their processes."""

import dataclasses
import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any, NamedTuple, Self

from benchmarks.versions.source_trees import ROOT


class Configuration(NamedTuple):
    """A configuration to compare."""

    version: str
    root: Path
    """The root of the source tree with this version."""
    devices: int
    """The devices that JAX makes of the CPU; one of them takes the steps."""
    threads: int | None = None
    """The threads of XLA; None for one per core, or per device if there are more devices."""
    without: str | None = None
    """The optimization that is taken out of the library."""

    @property
    def name(self) -> str:
        """The version, and what is different from the others."""
        threads = f", {self.threads} threads" if self.threads else ""
        without = f", without {self.without}" if self.without else ""
        return f"{self.version}{threads}{without}"


@dataclasses.dataclass
class Process:
    """An optimizer of a configuration, beside AdamW in the same process; compiled when it is made.

    Leaving the context kills it. If this process is killed, the pipe ends, and the other with it.
    """

    configuration: Configuration
    tree: str
    optimizer: str

    def __enter__(self) -> Self:
        """Starts it and waits until it has compiled, so that nothing else runs meanwhile."""
        configuration = self.configuration
        devices = configuration.devices
        flags = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        )
        worker = ["-m", "benchmarks.versions.worker", str(configuration.root), self.tree]
        worker += [self.optimizer, *([configuration.without] if configuration.without else [])]
        threads = {"NPROC": str(configuration.threads)} if configuration.threads else {}
        self.process = subprocess.Popen(
            [sys.executable, *worker],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"} | threads,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interruption is for this process, which ends that one
        )
        try:
            self.compiled = self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kills it, which frees its memory."""
        self.process.kill()
        self.process.communicate()

    def run(self) -> tuple[float, ...]:
        """Takes a turn: the seconds of AdamW's step and of the optimizer's."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return tuple(self._answer())

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            configuration = self.configuration
            raise RuntimeError(
                f"The process of {self.optimizer} of {configuration.name} with "
                f"{configuration.devices} devices has ended; "
                f"what it printed above says why."
            )
        return json.loads(line)
