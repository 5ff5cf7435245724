"""Set-up of every test: 8 fake CPU devices, run-time shape checks, and a compilation cache that outlives a run."""

import os
import pathlib
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile much and compute little, so programs are not optimized; tests/laws/resume.py runs what users run.
FLAGS = (
    "--xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# Eight devices share the cores, so on a machine that has none to spare one may keep the others waiting for long.
FLAGS += " --xla_cpu_collective_call_terminate_timeout_seconds=300"
if version("jaxlib").startswith("0.10."):
    # A third less time to compile; later versions know no such flag, and fail where it is set.
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  the hook looks it up by name
from tests.rooms import ROOMS

# All rooms but zoo.config, which answers wrong values itself.
install_import_hook([f"zoo.{room}" for room in ROOMS if room != "config"], "tests.typecheck.checked")

import jax
from hypothesis import settings

jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).parents[1] / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

# The same examples every time, however slow the machine.
settings.register_profile("zoo", deadline=None, derandomize=True)
settings.load_profile("zoo")
