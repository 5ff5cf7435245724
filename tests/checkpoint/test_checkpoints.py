"""A checkpoint comes back bit for bit, on any mesh, or not at all; what is wrong with one is said."""

import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zoo.checkpoint import CheckpointError, Checkpoints, is_finite
from zoo.checkpoint.leaves import checksums
from zoo.config import MeshConfig
from zoo.parallel.mesh import make_mesh

META = {"data": {"position": 12}, "scale": 0.1}


class State(NamedTuple):
    step: jax.Array
    params: dict
    opt_state: tuple


def make_state(step, mesh=None, width=8):
    """Random leaves of every dtype, split over the mesh; a function of `step`."""
    rng = np.random.default_rng(step)
    matrix = rng.normal(size=(16, width)).astype(np.float32)
    state = State(
        np.int32(step),
        {"a": {"w": matrix, "half": matrix[:8].astype(jnp.bfloat16)}, "flag": rng.integers(0, 2, 8).astype(bool)},
        ({"mu": -matrix}, rng.integers(0, 2**32, 8, np.uint32)),
    )
    return jax.tree.map(jax.device_put, state, shardings(state, mesh or make_mesh(MeshConfig(data=2, fsdp=4))))


def shardings(state, mesh):
    return jax.tree.map(lambda x: jax.NamedSharding(mesh, P("fsdp") if x.ndim else P()), state)


def abstract(state, mesh):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings(state, mesh))


def assert_same(found, state):
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=2, fsdp=4))


@pytest.fixture(scope="module")
def two(tmp_path_factory, mesh):
    """A directory with good checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("two")
    checkpoints = Checkpoints(directory)
    for step in (1, 2):
        checkpoints.save(step, make_state(step, mesh), META | {"step": step})
    checkpoints.close()
    return directory


@pytest.fixture
def copy(two, tmp_path):
    return pathlib.Path(shutil.copytree(two, tmp_path / "copy"))


def restored(directory, state, mesh):
    """What restore gives, and what it said."""
    said = []
    found = Checkpoints(directory, say=said.append).restore(abstract(state, mesh))
    return found, said


@pytest.mark.parametrize("sizes", [(2, 4, 1, 1), (1, 1, 1, 1), (1, 2, 2, 1), (2, 1, 1, 1), (1, 8, 1, 1)])
def test_restores_onto_another_mesh_and_device_count(two, sizes):
    config = MeshConfig(*sizes)
    other = make_mesh(config, jax.devices()[: np.prod(sizes)])
    state = make_state(2)
    (step, found, meta), said = restored(two, state, other)
    assert (step, meta, said) == (2, META | {"step": 2}, [])
    assert_same(found, state)
    assert jax.tree.map(lambda x: x.sharding, found) == shardings(state, other)


def test_checksum_does_not_depend_on_the_layout(mesh):
    state = {"x": np.arange(4096.0, dtype=np.float32).reshape(8, 512)}
    split = {"x": jax.device_put(state["x"], jax.NamedSharding(mesh, P("fsdp", "data")))}
    assert checksums(state) == checksums(split)
    expected = sum(mix(int(b) ^ mix(i)) for i, b in enumerate(state["x"].ravel().view(np.uint32))) % 2**32
    assert checksums(state)["x"] == expected


def mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_checksum_sees_every_bit_and_the_order(dtype):
    x = np.arange(1, 4).astype(dtype)
    seen = {checksums({"x": x})["x"], checksums({"x": x[::-1]})["x"]}
    for i in range(8 * x.nbytes):
        raw = bytearray(x.tobytes())
        raw[i // 8] ^= 1 << i % 8
        seen.add(checksums({"x": np.frombuffer(bytes(raw), x.dtype)})["x"])
    assert len(seen) == 8 * x.nbytes + 2


def test_the_state_may_be_donated_while_it_is_saved(tmp_path, mesh):
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + x, s), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path)
    state = {
        "w": jax.device_put(np.arange(2.0**20, dtype=np.float32).reshape(8, -1), jax.NamedSharding(mesh, P("fsdp")))
    }
    expected = np.asarray(state["w"]).copy()
    checkpoints.save(1, state, {})
    for _ in range(3):
        state = advance(state)
    checkpoints.close()
    like = {"w": jax.ShapeDtypeStruct(expected.shape, expected.dtype)}
    np.testing.assert_array_equal(Checkpoints(tmp_path).restore(like)[1]["w"], expected)


def test_nothing_there(tmp_path, mesh):
    assert Checkpoints(tmp_path / "none").restore(abstract(make_state(1), mesh)) is None
    assert not (tmp_path / "none").exists()


def damaged_files(directory):
    return sorted(p for p in (directory / "00000002").rglob("*") if p.is_file())


REASONS = (
    r"(is damaged: its (folder (state|meta)|(state|meta)/[\w./]+) cannot be read|is damaged: its manifest does not.*"
    r"|is damaged: .* does not have the checksum .*|is of another model .*|was not written by this program)"
)


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_damage_is_never_restored(copy, mesh, how):
    """Each file of the newest checkpoint in turn: either its state is whole all the same, or step 1 takes over."""
    state = make_state(2, mesh)
    passed_over = set()
    for path in damaged_files(copy):
        whole = path.read_bytes()
        positions = range(0, len(whole), max(1, len(whole) // 3)) if how == "flip" else [len(whole) // 2]
        for position in positions:
            damage(path, whole, position, how)
            (step, found, meta), said = restored(copy, state, mesh)
            assert_same(found, make_state(step, mesh))
            assert meta == META | {"step": step}
            assert len(said) == (step == 1)
            if step == 1:
                passed_over.add(path.relative_to(copy).parts[1])
                assert re.fullmatch(rf"checkpoint {copy}/00000002 {REASONS}; falling back to that of step 1", said[0])
        path.write_bytes(whole)
    assert {"state", "meta"} <= passed_over


def damage(path, whole, position, how):
    if how == "remove":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(whole[:position])
    else:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 16]) + whole[position + 1 :])


def test_a_flipped_bit_that_only_the_checksum_sees(tmp_path):
    state = {"w": np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {}, wait=True)
    path = max(tmp_path.rglob("*"), key=lambda p: p.stat().st_size)
    whole = path.read_bytes()
    damage(path, whole, len(whole) // 2, "flip")
    with pytest.raises(CheckpointError, match="step 1 is damaged: w does not have the checksum"):
        checkpoints.restore(state)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s._replace(params={"a": {"w": s.params["a"]["w"]}}), "also has params/a/half"),
        (lambda s: s._replace(opt_state=({"nu": s.opt_state[1]}, *s.opt_state)), "is of another model or optimizer"),
        (lambda s: s._replace(step=s.step.astype(jnp.float32)), r"step is int32\[\] there and float32\[\] here"),
    ],
)
def test_a_checkpoint_of_another_model(two, mesh, change, reason):
    with pytest.raises(CheckpointError, match=f"no checkpoint in .* step 2 .*{reason}.*; step 1 .* choose another run"):
        restored(two, change(make_state(1)), mesh)


def test_other_people_s_directories(copy, mesh):
    for name, content in (("00000007", "x"), ("00000009", '{"a": 1}')):
        (copy / name / "meta").mkdir(parents=True)
        (copy / name / "meta" / "metadata").write_text(content)
    (copy / "notes").mkdir()
    (copy / "12").mkdir()
    (step, _, _), said = restored(copy, make_state(2), mesh)
    assert step == 2 and len(said) == 2


def test_nothing_is_announced_that_does_not_happen(copy, mesh):
    """Where all are bad the error says so, and no fallback was said before."""
    (copy / "00000002/meta/metadata").unlink()
    (copy / "00000001/meta/metadata").unlink()
    (copy / "00000001/meta/metadata").mkdir()
    said = []
    words = (
        r"step 2 is damaged: its meta/metadata cannot be read; "
        r"step 1 is damaged: its meta/metadata cannot be read \(Is a directory\); restore"
    )
    with pytest.raises(CheckpointError, match=words):
        Checkpoints(copy, say=said.append).restore(abstract(make_state(2), mesh))
    assert said == []


def test_a_renamed_checkpoint(copy, mesh):
    (copy / "00000002").rename(copy / "00000005")
    (step, _, _), said = restored(copy, make_state(2), mesh)
    assert step == 1 and "00000005 was saved as step 2; falling back" in said[0]


def test_a_foreign_checkpoint(two, mesh):
    """The caller knows by its meta; a question that fails is an answer too."""
    state, said = make_state(1), []
    checkpoints = Checkpoints(two, say=said.append)
    foreign = lambda meta: "another run" if meta["step"] == 2 else None  # noqa: E731
    assert checkpoints.restore(abstract(state, mesh), foreign)[0] == 1
    assert "00000002 belongs to another run; falling back" in said[0]
    with pytest.raises(CheckpointError, match=r"step 2 belongs to x; step 1 belongs to x; .* choose another run"):
        checkpoints.restore_params(state.params, lambda meta: "x")
    with pytest.raises(CheckpointError, match=r"step 2 cannot be read \(KeyError: 'text'"):
        checkpoints.restore(abstract(state, mesh), lambda meta: meta["text"])


def test_parameters_alone(copy, mesh):
    state = make_state(2)
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)
    step, params, _ = Checkpoints(copy).restore_params(plain)
    assert step == 2
    assert_same(params, state.params)
    assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(params))
    with pytest.raises(CheckpointError, match="params/a/half is bfloat16"):
        Checkpoints(copy, say=lambda text: None).restore_params(
            plain | {"a": plain["a"] | {"half": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}
        )


def test_retention(tmp_path, mesh):
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 12):
        checkpoints.save(step, {"x": np.float32(step)}, {})
    checkpoints.close()
    assert checkpoints.steps() == [4, 8, 10, 11]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_bad_checkpoint_makes_way_and_stays(copy, mesh):
    """Training goes on from step 1 since 2 is damaged: 2 neither counts as newest nor is deleted or overwritten."""
    for path in damaged_files(copy):
        path.write_bytes(b"")
    said = []
    checkpoints = Checkpoints(copy, keep_last=1, say=said.append)
    assert checkpoints.restore(abstract(make_state(2), mesh))[0] == 1
    checkpoints.save(2, make_state(2, mesh), META | {"step": 2})
    checkpoints.close()
    assert checkpoints.steps() == [2]
    assert (copy / "00000002.aside" / "state").is_dir()
    assert "could not be restored; it is now 00000002.aside" in said[-1]
    assert restored(copy, make_state(2), mesh)[0][0] == 2


def test_what_was_restored_is_not_saved_again(copy, mesh):
    said = []
    checkpoints = Checkpoints(copy, say=said.append)
    checkpoints.restore(abstract(make_state(2), mesh))
    checkpoints.save(2, make_state(2, mesh), {})
    assert said == [] and checkpoints.steps() == [1, 2]


def test_beginning_again_moves_the_future_aside(copy, mesh):
    said = []
    checkpoints = Checkpoints(copy, say=said.append)
    (copy / "00000002.aside").mkdir()
    checkpoints.save(2, make_state(3, mesh), {}, wait=True)
    assert checkpoints.steps() == [1, 2]
    assert "now 00000002.aside1" in said[0]


def test_is_finite(mesh):
    state = make_state(1, mesh)
    assert is_finite(state)
    for bad in (np.nan, -np.inf):
        w = state.params["a"]["half"].at[3, 3].set(bad)
        assert not is_finite(state._replace(params={"half": w}))
    assert is_finite({"count": np.int32(3)})


CHILD = """
import sys, resource
import numpy as np
from zoo.checkpoint import CheckpointError, Checkpoints
directory, limit = sys.argv[1], int(sys.argv[2])
checkpoints = Checkpoints(directory)
size, n = int(sys.argv[3]), int(sys.argv[4])
array = lambda step: np.random.default_rng(step).normal(size=(size,)).astype(np.float32)
state = lambda step: {"x": array(step)} | {f"x{i}": array(i) for i in range(1, n)}
checkpoints.save(1, state(1), {}, wait=True)
print("saved 1", flush=True)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
for step in range(2, 100):
    try:
        checkpoints.save(step, state(step), {}, wait=True)
    except CheckpointError as error:
        print(error, flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        checkpoints.save(step, state(step), {}, wait=True)
        break
"""


def start(directory, limit=0, size=1 << 20, n=1):
    command = [sys.executable, "-c", CHILD, *map(str, (directory, limit, size, n))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_while_saving(tmp_path):
    """SIGKILL as soon as a temporary directory is there: the checkpoints before it restore, and it goes away."""
    child = start(tmp_path)
    child.stdout.readline()
    while not list(tmp_path.glob("*tmp*")) and child.poll() is None:
        time.sleep(0)
    child.kill()
    child.communicate()
    checkpoints = Checkpoints(tmp_path)
    step, state, _ = checkpoints.restore({"x": jax.ShapeDtypeStruct((1 << 20,), jnp.float32)})
    np.testing.assert_array_equal(state["x"], np.random.default_rng(step).normal(size=1 << 20).astype(np.float32))
    checkpoints.save(200, {"x": np.float32(0)}, {}, wait=True)
    assert not list(tmp_path.glob("*tmp*"))


@pytest.mark.parametrize(("limit", "size", "n"), [(1 << 20, 1 << 20, 1), (1 << 14, 1 << 14, 60)])
def test_a_full_disk(tmp_path, limit, size, n):
    """The error says what was needed, the last good checkpoint stays, and the next save works; nothing is on screen."""
    child = start(tmp_path, limit, size, n)
    out, err = child.communicate(timeout=60)
    message = out.splitlines()[1]
    assert message.startswith(f"the checkpoint of step 2 could not be saved to {tmp_path} (File too large)")
    assert f"it needs about {4 * size * n:,} bytes and " in message
    assert message.endswith("the last good checkpoint is that of step 1")
    assert err == ""
    assert Checkpoints(tmp_path).steps() == [1, 2]
    assert not list(tmp_path.glob("*tmp*"))
