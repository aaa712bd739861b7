"""Strict settings for every test, and eight CPU devices, or as many as TEST_DEVICES says."""

import ctypes
import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_force_host_platform_device_count={os.environ.get('TEST_DEVICES', '8')}"
    + " --xla_backend_optimization_level=0"
)
if "TEST_COMPILER" not in os.environ:
    # A program is compiled in a third of the time without MLIR's kernels of fusions (jax 0.6 has
    # none), and as one module; half of the tests' time is the compiler's.
    os.environ["XLA_FLAGS"] += (
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].strip()

import jax
import pytest

# jax.enable_x64 is new in jax 0.8; its predecessor warns from then on.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


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


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped():
    """Drops the programs of a module after it; otherwise a worker grows to several gigabytes."""
    yield
    jax.clear_caches()
    # The C library of Linux keeps freed memory until it is asked to give it back.
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back:
        give_back(0)


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
