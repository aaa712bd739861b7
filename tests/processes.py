"""Programs in processes of their own: alone, or several that make one program, as hosts would."""

import contextlib
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import tempfile

ROOT = Path(__file__).parents[1]


def printed_by(program, flags="", seconds=120):
    """What a program prints, with these flags of XLA; a warning in it is an error."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
        finally:  # with the processes that it may have started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        errors.seek(0)
        assert code == 0, errors.read()
        return output.read()


def free_address():
    """Where the first process can wait for the others."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def run_together(commands, devices, logs, seconds):
    """What the first of several processes prints, once all have ended well.

    Args:
        commands: that of each process.
        devices: those of each process.
        logs: where each prints to.
        seconds: how long they may take.
    """
    environment = os.environ | {
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    started = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("w") as output:
                started.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                )
        codes = [process.wait(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    printed = [log.read_text() for log in logs]
    assert not any(codes), "\n".join(printed)
    return printed[0]
