"""Prints the newest Python on this machine that is newer than 3.11, for `make newest`.

It prints nothing if there is none. Pythons are looked for on the path and among those that pyenv
keeps. Left out are versions before their release, and builds without the GIL.
"""

import os
from pathlib import Path
import shutil
import subprocess

OLDEST = (3, 12)
"""The oldest Python that the newest JAX runs on."""

ASKED = "import sys, sysconfig, venv; " + "; ".join(
    (
        "assert sys.version_info.releaselevel == 'final'",
        "assert not sysconfig.get_config_var('Py_GIL_DISABLED')",
        "print(*sys.version_info[:3])",
    )
)


def candidates():
    """The programs that may be a Python."""
    for minor in range(OLDEST[1], OLDEST[1] + 20):
        found = shutil.which(f"python3.{minor}")
        if found:
            yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    yield from map(str, pyenv.glob("versions/*/bin/python"))


def version(python):
    """The version of a Python, or () if it is none that can be used."""
    asked = subprocess.run([python, "-c", ASKED], capture_output=True, text=True, check=False)
    return tuple(map(int, asked.stdout.split())) if asked.returncode == 0 else ()


if __name__ == "__main__":
    newest = max(((version(python), python) for python in candidates()), default=((), ""))
    if newest[0] >= OLDEST:
        print(newest[1])
