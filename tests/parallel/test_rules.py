"""Layouts: what the rules promise, for parameters, optimizer state, activations and bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from zoo.config import ConfigError, MeshConfig, ModelConfig
from zoo.layers.logical import ParamSpec
from zoo.models.decoder import build
from zoo.parallel import rules
from zoo.parallel.mesh import make_mesh


def spec(shape, *axes):
    return ParamSpec(jax.ShapeDtypeStruct(shape, jnp.float32), axes, "matrix")


SPECS = {
    "embedding": spec((32, 16), "vocab", "embed"),
    "stage_0": {
        "query": spec((2, 16, 4, 8), "layers", "embed", "heads", "head_dim"),
        "key": spec((2, 16, 1, 8), "layers", "embed", "kv_heads", "head_dim"),
        "experts": spec((2, 4, 16, 12), "layers", "expert", "embed", "mlp"),
        "scale": spec((2, 3), "layers", "embed"),
    },
}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=1, fsdp=2, tensor=2, expert=2))


def specs_of(shardings):
    return jax.tree.map(lambda s: s.spec, shardings)


def test_zero_3_splits_parameters(mesh):
    assert specs_of(rules.param_shardings(SPECS, mesh, 3)) == {
        "embedding": P("tensor", "fsdp"),
        "stage_0": {
            "query": P(None, "fsdp", "tensor", None),
            "key": P(None, "fsdp", None, None),
            "experts": P(None, "expert", "fsdp", "tensor"),
            "scale": P(None, None),
        },
    }


@pytest.mark.parametrize(("zero", "params", "grads", "state"), [(1, 0, 0, 1), (2, 0, 1, 1), (3, 1, 1, 1)])
def test_zero_says_what_is_split_over_fsdp(mesh, zero, params, grads, state):
    abstract = {"mu": jax.tree.map(lambda s: s.value, SPECS, is_leaf=rules.is_spec)}
    found = (
        rules.param_shardings(SPECS, mesh, zero)["embedding"],
        rules.grad_shardings(SPECS, mesh, zero)["embedding"],
        rules.optimizer_shardings(abstract, SPECS, mesh, zero)["mu"]["embedding"],
    )
    assert tuple("fsdp" in s.spec for s in found) == (bool(params), bool(grads), bool(state))
    assert all("tensor" in s.spec for s in found)


def test_fsdp_takes_the_next_dimension_that_divides(mesh):
    assert rules.spec_for(("embed", "mlp"), (15, 12), rules.SPLIT, mesh) == P(None, "tensor")
    assert rules.spec_for(("embed", "head_dim"), (15, 12), rules.SPLIT, mesh) == P(None, "fsdp")
    assert rules.spec_for(("layers", "embed"), (4, 15), rules.SPLIT, mesh) == P(None, None)


def test_optimizer_state_follows_its_parameters(mesh):
    params = jax.tree.map(lambda s: s.value, SPECS, is_leaf=rules.is_spec)
    mask = {"embedding": False, "stage_0": dict.fromkeys(SPECS["stage_0"], True)}
    optimizer = optax.chain(optax.masked(optax.adamw(1e-3), mask), optax.sgd(0.1, momentum=0.9))
    state = jax.eval_shape(optimizer.init, params)
    found = dict(jax.tree_util.tree_leaves_with_path(rules.optimizer_shardings(state, SPECS, mesh, 1)))
    by_name = {rules.path_name(path): s.spec for path, s in found.items()}
    assert len(by_name) == 1 + 2 * 4 + 5  # Adam's counter and two moments, momentum
    for name, placed in by_name.items():
        last = name.split("/")[-1]
        expected = {"embedding": P("tensor", "fsdp"), "experts": P(None, "expert", "fsdp", "tensor"), "count": P()}
        assert placed == expected.get(last, placed), name
        assert last in ("count", "scale") or "fsdp" in placed, name


def test_factored_state_keeps_the_axes_it_has(mesh):
    shape = jax.ShapeDtypeStruct
    state = {
        "row": {"stage_0": {"experts": shape((2, 4, 16), jnp.float32)}},
        "column": {"stage_0": {"experts": shape((2, 4, 12), jnp.float32)}},
        "none": {"stage_0": {"experts": shape((1,), jnp.float32)}},
        "stranger": {"experts": shape((2, 4, 16), jnp.float32)},
    }
    placed = jax.tree.leaves(specs_of(rules.optimizer_shardings(state, SPECS, mesh, 1)), is_leaf=lambda x: x is None)
    assert placed == [P(None, "expert", "tensor"), P(), P(None, "expert", "fsdp"), P()]


def test_two_axes_on_one_mesh_axis(mesh):
    with pytest.raises(ValueError, match="qkv: its axes heads and mlp both lie on mesh axis tensor"):
        rules.spec_for(("heads", "mlp"), (4, 4), rules.WHOLE, mesh, "qkv")


def test_a_dimension_that_does_not_divide(mesh):
    bad = {"stage_0": {"up": spec((16, 13), "embed", "mlp")}}
    with pytest.raises(ConfigError, match=r"mesh.tensor=2 does not divide the mlp dimension of stage_0/up.* 13;"):
        rules.param_shardings(bad, mesh, 3)


def test_more_kv_heads_than_parts_must_divide(mesh):
    with pytest.raises(ConfigError, match="kv_heads dimension of key, which is 3"):
        rules.spec_for(("kv_heads",), (3,), rules.WHOLE, mesh, "key")


def test_batch(mesh):
    rows = jax.device_put(np.zeros((8, 3)), rules.batch_sharding(mesh))
    assert {s.data.shape for s in rows.addressable_shards} == {(2, 3)}
    rules.check_batch("train.batch_size=8", 8, mesh)
    reason = r"train.batch_size=6 gives 6 rows.*mesh.data=1 x mesh.fsdp=2 x mesh.expert=2; choose a multiple of 4$"
    with pytest.raises(ConfigError, match=reason):
        rules.check_batch("train.batch_size=6", 6, mesh)


def test_constrain_pins_and_leaves_values(mesh):
    constrain = rules.make_constrain(mesh)
    x = jnp.arange(4 * 3 * 8.0).reshape(4, 3, 8)
    y = jax.jit(lambda x: constrain(x, ("batch", "length", "mlp")))(x)
    np.testing.assert_array_equal(y, x)
    assert y.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(("fsdp", "expert"), None, "tensor")), 3)
    odd = jax.jit(lambda x: constrain(x, ("batch", "length", "mlp")))(x[:3])
    assert odd.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(None, None, "tensor")), 3)


def test_constrain_is_a_value():
    one, other = (rules.make_constrain(make_mesh(MeshConfig(data=2, fsdp=4))) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != rules.make_constrain(make_mesh(MeshConfig(data=4, fsdp=2)))


def test_constrain_does_nothing_on_one_device():
    x = jnp.ones((2, 3))
    assert rules.make_constrain(make_mesh(MeshConfig(), jax.devices()[:1]))(x, ("batch", "embed")) is x


def test_bytes_and_report(mesh):
    whole = [rules.device_bytes(SPECS, rules.param_shardings(SPECS, mesh, zero)) for zero in (1, 3)]
    counts = {"embedding": (256, 128), "query": (512, 256), "key": (256, 128), "experts": (384, 192), "scale": (6, 6)}
    assert whole == [4 * sum(c[i] for c in counts.values()) for i in (0, 1)]
    assert rules.replicated(SPECS, mesh, 3) == [("stage_0/key", "tensor"), ("stage_0/scale", "fsdp")]
    line = rules.report(SPECS, mesh, 3)
    assert "fsdp 2 x tensor 2 x expert 2, ZeRO 3" in line
    assert "not split over tensor: stage_0/key; not split over fsdp: stage_0/scale" in line


PARTS = ModelConfig(
    vocab_size=46,
    vocab_multiple=4,
    d_model=16,
    n_heads=4,
    n_kv_heads=1,
    context_length=7,
    attention_bias=("q", "k", "v", "o"),
    attention_sinks=True,
    qk_norm="full",
    position="learned",
    position_offset=2,
    tie_embeddings=False,
    head_bias=True,
    embedding_norm=True,
    glu=False,
    ffn_bias=True,
    norm_bias=True,
)


def test_every_part_has_its_place(mesh):
    """Biases lie as what they are added to; one key head and a table of 9 positions stay whole."""
    shardings = rules.param_shardings(build(PARTS).abstract_params(), mesh, 1)
    leaves = jax.tree_util.tree_leaves_with_path(specs_of(shardings), is_leaf=lambda x: isinstance(x, P))
    found = {rules.path_name(path).removeprefix("stage_0/block_0/"): spec for path, spec in leaves}
    split = {name: spec for name, spec in found.items() if spec != P(*[None] * len(spec))}
    assert split == {
        "attention/b_q": P(None, "tensor", None),
        "attention/q_norm/scale": P(None, "tensor", None),
        "attention/sinks": P(None, "tensor"),
        "attention/w_o": P(None, "tensor", None, None),
        "attention/w_q": P(None, None, "tensor", None),
        "embedding/table": P("tensor", None),
        "ffn/b_up": P(None, "tensor"),
        "ffn/w_down": P(None, "tensor", None),
        "ffn/w_up": P(None, None, "tensor"),
        "head/bias": P("tensor"),
        "head/w": P(None, "tensor"),
    }
    assert rules.param_shardings(build(PARTS).abstract_params(), mesh, 3)["embedding"]["positions"].spec == P(
        None, "fsdp"
    )


def test_a_vocabulary_that_does_not_divide_is_padded():
    mesh = make_mesh(MeshConfig(data=1, tensor=4), jax.devices()[:4])
    specs = build(dataclasses.replace(PARTS, vocab_multiple=1)).abstract_params()
    with pytest.raises(ConfigError, match=r"vocab dimension of embedding/table, which is 46.*model.vocab_multiple=4$"):
        rules.param_shardings(specs, mesh, 3)
    assert rules.param_shardings(build(PARTS).abstract_params(), mesh, 3)["head"]["bias"].spec == P("tensor")
