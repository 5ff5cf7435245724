"""Tests that compile for chips that are not there, with the compilers of the TPU and of the GPU.

`make test-aot` installs these (the extra `aot`) in .venv-aot and runs all of it; `make test` does not come here.
One file or test: `.venv-aot/bin/python -m pytest tests/aot/test_kernels.py -k "v5e and pallas"`.

To have a kernel compiled, be in a table of zoo/kernels: test_kernels.py compiles every backend there is, forward and
backward, for every chip that the backend does not refuse. For a shape of one's own:

    from tests.aot.targets import compiled
    program = compiled(jax.grad(f), jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.bfloat16), on="v5e")  # v5p v6e h200
    assert program.kernels == 2  # Pallas calls in it; print(program) says seconds and bytes

While it is traced, `zoo.kernels.target.target()` names the chip, by the mesh that is set; jax.devices() are CPUs.
For numbers, races and memory that nobody has written, without the chip's compiler:

    from tests.aot.interpreted import interpreted
    np.testing.assert_allclose(interpreted(f, x), expected)
"""

import os
from importlib.util import find_spec

import jax
import pytest

from tests.conftest import FLAGS

if find_spec("libtpu") is None or find_spec("jax_cuda13_plugin") is None:
    raise pytest.UsageError("tests/aot needs the compilers of TPU and GPU; `make test-aot` installs and runs them")

# The other tests tell XLA to optimize nothing, which would reach these compilers too.
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(FLAGS, "").strip()
# libtpu asks nobody where it is and for its chips, is quiet, and lets several processes use it at once.
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# What was compiled before would not be compiled.
jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture
def report(request: pytest.FixtureRequest):
    """report(program) has the program's time and memory said at the end of the run."""
    return lambda program: request.node.user_properties.append(("program", str(program)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what was compiled, in how long, and what it holds on each device."""
    passed = terminalreporter.stats.get("passed", [])
    programs = [(test, text) for test in passed for name, text in test.user_properties if name == "program"]
    if programs:
        terminalreporter.section("compiled")
    for test, text in programs:
        terminalreporter.write_line(f"{test.nodeid.split('::')[1]}: {text}")
