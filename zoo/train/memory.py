"""The memory of a process whose devices are its own CPUs."""

import ctypes

import jax

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Lets the next step use the memory of the last one, without the system in between; nothing on other devices.

    XLA frees a step's buffers, hundreds of megabytes, and asks for as many. glibc returns memory of that size to the
    system, which hands it out again zeroed, page by page: a sixth of a step's time (benchmarks/NOTES.md). Afterwards
    the process keeps what it has once used. Threads other than the main one could not keep it, so computations run
    in the thread that asks for them: call this before anything uses devices. Other C libraries stay as they are.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if jax.default_backend() != "cpu":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
