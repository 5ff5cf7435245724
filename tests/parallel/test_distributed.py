"""Two processes with two devices each train as one; a single machine has nothing to join."""

import http.server
import os
import socket
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zoo.config import ConfigError, MeshConfig
from zoo.parallel import distributed
from zoo.parallel.mesh import make_mesh

CHILD = """
import sys
import jax, numpy as np
from zoo.checkpoint import Checkpoints
from zoo.config import MeshConfig
from zoo.parallel import distributed
from zoo.parallel.mesh import make_mesh

distributed.initialize()
distributed.initialize()
mesh = make_mesh(MeshConfig(fsdp=2))
batch = np.arange(24).reshape(8, 3)
rows = distributed.process_rows(8, mesh)
x = distributed.global_batch({"tokens": batch[rows]}, mesh)["tokens"]
total = jax.jit(lambda x: (x * x).sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))(x)
print("rows", rows.start, rows.stop, "total", int(total))

checkpoints = Checkpoints(sys.argv[1], say=print)
state = {"x": x, "total": total}
for step in (1, 2, 3):
    checkpoints.save(step, state, {"step": step}, wait=True)
checkpoints.close()
abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
step, found, meta = Checkpoints(sys.argv[1], say=print).restore(abstract)
same = all(np.array_equal(a.data, b.data) for a, b in zip(found["x"].addressable_shards, x.addressable_shards))
print("restored", step, meta, same)
print("agree", distributed.agree(True), distributed.agree(jax.process_index() == 0))
"""


@pytest.fixture
def no_cluster(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TPU_", "JAX_COORD", "JAX_NUM_", "JAX_PROCESS_")):
            monkeypatch.delenv(name)


def test_two_processes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    shared = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    shared |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    command = [sys.executable, "-c", CHILD, str(tmp_path / "checkpoints")]
    children = [
        subprocess.Popen(command, env=shared | {"JAX_PROCESS_ID": str(i)}, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        printed = [child.communicate(timeout=120)[0].splitlines() for child in children]
    finally:
        for child in children:
            child.kill()
    for i, lines in enumerate(printed):
        assert [line for line in lines if not line.startswith("[Gloo]")] == [
            f"rows {4 * i} {4 * i + 4} total {sum(n * n for n in range(24))}",
            "restored 3 {'step': 3} True",
            "agree True False",
        ]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["00000002", "00000003"]


def joins(monkeypatch):
    """The arguments with which `initialize` joins others, or None."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: calls.append(args))
    distributed.initialize()
    return calls[0] if calls else None


def test_a_single_machine_joins_nothing(no_cluster, monkeypatch):
    assert joins(monkeypatch) is None
    monkeypatch.setenv("SLURM_NTASKS", "8")  # a shell inside an allocation, not started by srun
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert joins(monkeypatch) is None


@pytest.mark.parametrize(
    "variable", [("SLURM_STEP_NUM_TASKS", "8"), ("OMPI_COMM_WORLD_SIZE", "2"), ("TPU_WORKER_HOSTNAMES", "a,b")]
)
def test_a_cluster_is_joined(no_cluster, monkeypatch, variable):
    monkeypatch.setenv(*variable)
    assert joins(monkeypatch) == ()


@pytest.mark.parametrize(("hosts", "expected"), [(b"a:0:10.0.0.1,b:1:10.0.0.2", ()), (b"a:0:10.0.0.1", None)])
def test_a_tpu_pod_is_known_to_its_metadata_server(no_cluster, monkeypatch, hosts, expected):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.headers["Metadata-Flavor"] == "Google" else 403)
            self.end_headers()
            self.wfile.write(hosts)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("localhost", 0), Handler) as server:
        threading.Thread(target=server.handle_request).start()
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setenv("TPU_ML_PLATFORM", "JAX")
        monkeypatch.setenv("GCE_METADATA_IP", f"localhost:{server.server_port}")
        assert joins(monkeypatch) == expected


def test_an_address_alone_is_not_enough(no_cluster, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1234")
    with pytest.raises(ConfigError, match="JAX_NUM_PROCESSES='' is not a number; JAX_COORDINATOR_ADDRESS is set"):
        distributed.initialize()


def test_one_process_feeds_all_rows():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert distributed.process_rows(8, mesh) == slice(0, 8)
    batch = np.arange(24).reshape(8, 3)
    found = distributed.global_batch({"tokens": batch}, mesh)["tokens"]
    np.testing.assert_array_equal(found, batch)
    assert found.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(("data", "fsdp"))), 2)
