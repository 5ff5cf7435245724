import platform
import subprocess
import sys

import pytest

# The product between two others is 128 MB, more than glibc keeps.
PROGRAM = """
import resource
from zoo.train.memory import keep_freed_memory
{call}
import jax, jax.numpy as jnp
x, y, z = jnp.ones((2**13, 8)), jnp.ones((8, 2**12)), jnp.ones((2**12, 8))
step = jax.jit(lambda x: x @ y @ z)
for _ in range(5):
    step(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(call):
    """Pages that the third of three equal steps had to be given."""
    program = PROGRAM.format(call=call)
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be told")
def test_a_step_gets_the_memory_of_the_step_before():
    assert faults("pass") > 10 * faults("keep_freed_memory()")
