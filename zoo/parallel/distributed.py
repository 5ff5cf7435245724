"""Several processes, each with some of the devices: joining, sharing out rows, agreeing."""

import itertools
import os
import urllib.request
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from zoo.config import ConfigError
from zoo.parallel.rules import batch_sharding

_ADDRESS = "JAX_COORDINATOR_ADDRESS"


def initialize() -> None:
    """Joins the other processes of the job, if the environment names any; call before anything uses devices.

    A single machine has nothing to join. In a Slurm step, under Open MPI and on TPU pods JAX finds the others by
    itself; elsewhere set JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Raises:
        ConfigError: where JAX_COORDINATOR_ADDRESS comes without the other two.
    """
    if jax.distributed.is_initialized():
        return
    if _ADDRESS in os.environ:
        n, i = (_number(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        jax.distributed.initialize(os.environ[_ADDRESS], n, i)
    elif _launched_together() or _tpu_pod():
        jax.distributed.initialize()


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ConfigError(f"{name}={value!r} is not a number; {_ADDRESS} is set, so set {name} for every process too")
    return int(value)


def _launched_together() -> bool:
    # Of Slurm only what `srun` sets: a shell inside an allocation is a single process, and would wait for ever.
    several = any(os.environ.get(name, "1") != "1" for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    return several or any("," in os.environ.get(name, "") for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"))


def _tpu_pod() -> bool:
    """Whether this is one of several hosts of a Cloud TPU, whose names only Google's metadata server knows."""
    # JAX sets TPU_ML_PLATFORM on import where it finds TPU chips.
    if "TPU_ML_PLATFORM" not in os.environ or "TPU_SKIP_MDS_QUERY" in os.environ:
        return False
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/worker-network-endpoints"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers={"Metadata-Flavor": "Google"}), timeout=5
        ) as reply:
            return b"," in reply.read()
    except OSError:  # no such server, or it knows of no TPU
        return False


def process_rows(rows: int, mesh: Mesh) -> slice:
    """Which rows of a batch of `rows` this process feeds: those that its devices hold under `batch_sharding`.

    Raises:
        ConfigError: where the devices of this process hold rows that do not follow each other.
    """
    held = batch_sharding(mesh).addressable_devices_indices_map((rows,)).values()
    parts = sorted({index[0].indices(rows)[:2] for index in held})
    if any(stop != start for (_, stop), (start, _) in itertools.pairwise(parts)):
        raise ConfigError(
            f"process {jax.process_index()} would hold rows {parts} of a batch; order the devices by process"
        )
    return slice(parts[0][0], parts[-1][1])


def global_batch(local: Any, mesh: Mesh) -> Any:
    """Global arrays [B, ...], laid out by `batch_sharding`, from this process's rows.

    Args:
        local: a tree of NumPy arrays, the rows `process_rows(B, mesh)` of each.
    """
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), local)


def barrier(name: str) -> None:
    """Returns when every process has come here; at once where there is only one."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def agree(ok: bool) -> bool:
    """Whether `ok` holds on every process."""
    return ok if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.array(ok)).all())
