"""Strict settings for every test, and eight CPU devices, or as many as TEST_DEVICES says.

With TEST_COMPILER=usual programs are compiled as users have them, but for the optimisation level.
"""

import ctypes
import gc
from importlib.metadata import version
import os
from pathlib import Path

# XLA ends the process at a flag that it does not know.
JAXLIB = tuple(map(int, version("jaxlib").split(".")[:2]))
HAS_EMITTERS = JAXLIB in ((0, 8), (0, 9), (0, 10))
flags = [
    f"--xla_force_host_platform_device_count={os.environ.get('TEST_DEVICES', '8')}",
    "--xla_backend_optimization_level=0",
]
# Half of the tests' time was the compiler's. It takes a third of it without the kernels of fusions
# that newer XLA makes by MLIR, and for one module instead of 32.
quick = os.environ.get("TEST_COMPILER") != "usual" and JAXLIB >= (0, 8)  # jaxlib 0.6 refuses one
if quick:
    flags += ["--xla_cpu_parallel_codegen_split_count=1"]
if quick and HAS_EMITTERS:
    flags += ["--xla_cpu_use_fusion_emitters=false"]
if JAXLIB >= (0, 10):
    # On two loaded cores eight devices may wait for each other longer than the 40 seconds after
    # which XLA ends the process.
    flags += ["--xla_cpu_collective_call_terminate_timeout_seconds=600"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
# XLA's pools have a thread for each device, and devices that wait for each other take them all.
os.environ.setdefault("NPROC", "32")

import jax
import pytest

# Before pytest collects the docstrings of a module: it would import the module a second time.
import optax_largebatch  # noqa: F401

# jax.enable_x64 is new in jax 0.8; its predecessor warns from then on.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

# For tests that look at the memory, the bytes or the text of a compiled program.
as_users_have_it = {"xla_cpu_use_fusion_emitters": True} if quick and HAS_EMITTERS else {}

# What is imported stays, and JAX makes many small objects: Python need not look so often.
gc.freeze()
gc.set_threshold(100_000, 20, 100)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A sixteenth of the tests' time: each operation that is lowered says from which lines it came.
jax.config.update("jax_traceback_in_locations_limit", 0)


def read_back(state, folder, target=None):
    """A state from a checkpoint of Orbax, without its types if there is no target."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "saved", target)


def slow_but(quick, names):
    """Parameters of a test that is slow, but for a few."""
    return [pytest.param(x, marks=[pytest.mark.slow] * (x not in quick)) for x in names]


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """A program that several tests compile is compiled once, for all workers of pytest-xdist."""
    if jax.__version_info__ < (0, 10):
        return  # jaxlib 0.6 reads some loops back wrongly: they do not turn
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    jax.config.update("jax_compilation_cache_dir", str(shared / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def is_large():
    """Whether this process has 2 GB in memory; or it is not known, outside of Linux."""
    pages = Path("/proc/self/statm")
    return not pages.exists() or int(pages.read_text().split()[1]) * 4096 > 2e9


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped(request):
    """Drops all programs once they are large. (After each module it took a sixth of the time.)

    And those that were traced with another library, before and after a module that changes it.
    """
    source = Path(request.module.__file__).read_text()
    changes_the_library = "monkeypatch" in source and "from optax_largebatch" in source
    if changes_the_library:
        jax.clear_caches()
    yield
    if changes_the_library or is_large():
        jax.clear_caches()
        # The C library of Linux keeps freed memory until it is asked to give it back.
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if give_back:
            give_back(0)


@pytest.fixture(scope="module")
def standard_promotion():
    """For programs that are not strict about dtypes and ranks: those of optax, Flax and users."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def x64():
    """Runs a test with 64-bit numbers."""
    with enable_x64(True):
        yield


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def both_precisions(request):
    """Runs a test with 32-bit and again with 64-bit numbers; the value says which."""
    with enable_x64(request.param):
        yield request.param
