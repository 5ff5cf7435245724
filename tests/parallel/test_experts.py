"""Experts spread over a mesh give what they give on one device: values and gradients, and with empty experts."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zoo.config import ConfigError, MeshConfig, ModelConfig, SparseConfig
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams
from zoo.layers.moe import build_moe, sorted_experts
from zoo.parallel.experts import MeshExperts
from zoo.parallel.mesh import make_mesh

N, D, F, E, k = 32, 8, 12, 4, 2


def make_inputs(n_experts=E, n=N, glu=True):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    # Expert 1 gets no token, and index E (a dropped assignment) some; a token's experts differ.
    choices = [0, *range(2, n_experts + 1)]
    indices = np.array([rng.choice(choices, size=k, replace=False) for _ in range(n)], np.int32)
    up, down = (n_experts, D, F), (n_experts, F, D)
    params = FFNParams(normal(*up) if glu else None, normal(*up), normal(*down))
    return jax.tree.map(jnp.asarray, (normal(n, D), indices, np.abs(normal(n, k)), params))


def loss(run, x, indices, weights, params):
    y = run(x, indices, weights, params, HiddenUnits("silu"))
    return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y


def values_and_grads(run, inputs):
    function = jax.value_and_grad(functools.partial(loss, run), argnums=(0, 2, 3), has_aux=True)
    return jax.jit(function)(*inputs)


@functools.cache
def on_one_device(n=N, glu=True):
    return values_and_grads(sorted_experts, make_inputs(n=n, glu=glu))


MESHES = {
    "data 2, expert 4": MeshConfig(data=2, expert=4),
    "tensor 4, expert 2": MeshConfig(data=1, tensor=4, expert=2),
    "fsdp 2, expert 2, tensor 2": MeshConfig(data=1, fsdp=2, expert=2, tensor=2),
    "data 8": MeshConfig(data=8),
}


def assert_equal(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", MESHES)
def test_equals_one_device(name):
    mesh = make_mesh(MESHES[name])
    x, indices, weights, params = make_inputs()
    rows = NamedSharding(mesh, P(("data", "fsdp", "expert")))
    split = lambda w, *axes: jax.device_put(w, NamedSharding(mesh, P(*axes)))  # noqa: E731
    # As ZeRO 3 lays them out: the width D of each weight over fsdp.
    params = FFNParams(
        split(params.w_gate, "expert", "fsdp", "tensor"),
        split(params.w_up, "expert", "fsdp", "tensor"),
        split(params.w_down, "expert", "tensor", "fsdp"),
    )
    inputs = (*(jax.device_put(a, rows) for a in (x, indices, weights)), params)
    found = values_and_grads(MeshExperts(mesh), inputs)
    assert_equal(found, on_one_device())
    y, grads = found[0][1], found[1]
    assert y.sharding.is_equivalent_to(rows, 2)
    assert not np.any(grads[2].w_up[1]), "an expert without tokens has no gradient"


def test_rows_that_do_not_divide_and_no_gate():
    mesh = make_mesh(MeshConfig(data=4, expert=2))
    found = values_and_grads(MeshExperts(mesh), make_inputs(n=3, glu=False))
    assert_equal(found, on_one_device(n=3, glu=False))


def biased_inputs():
    """Every parameter that a feed-forward network can have."""
    x, indices, weights, params = make_inputs()
    rng = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    biases = {"b_gate": normal(E, F), "b_up": normal(E, F), "b_down": normal(E, D), "beta": normal(E)}
    return x, indices, weights, params._replace(**biases)


def test_biases_and_a_learned_beta():
    """The output's bias is added once, however many parts the hidden units are in."""

    def run(experts):
        return lambda x, indices, weights, params, _: experts(
            x, indices, weights, params, HiddenUnits("swish_learned", glu_clamp=0.5)
        )

    inputs = biased_inputs()
    expected = values_and_grads(run(sorted_experts), inputs)
    for config in (MeshConfig(data=1, fsdp=2, expert=2, tensor=2), MeshConfig(data=2, tensor=4)):
        assert_equal(values_and_grads(run(MeshExperts(make_mesh(config))), inputs), expected)


SPARSE = {"n_experts": E, "d_ff": F, "balance_weight": 0.01, "balance_scope": "sequence"}
ROUTINGS = {
    "dropless": SparseConfig(**SPARSE),
    "capacity": SparseConfig(**SPARSE, capacity_factor=0.5),
    "rerouted": SparseConfig(**SPARSE, capacity_factor=0.5, overflow="reroute"),
    "experts choose": SparseConfig(n_experts=E, d_ff=F, choice="expert", capacity_factor=0.5),
}
B, T = 8, 8


def mixture(routing, experts=sorted_experts):
    """params, x -> a loss of output and statistics of a mixture in training; and both."""
    (stage,) = ModelConfig(d_model=D, n_heads=2, n_layers=1).expand()
    module = build_moe(dataclasses.replace(stage.blocks[0], moe=ROUTINGS[routing]), experts=experts)
    # The last row is padding, and so is the end of the others.
    mask = (jnp.arange(T) < T - 2) & (jnp.arange(B) < B - 1)[:, None]
    at = {"positions": jnp.zeros((B, T), int), "segment_ids": mask.astype(int)}

    def run(params, x):
        y, stats, _ = module.apply({"params": params}, x, mask, deterministic=False, **at)
        return jnp.sum(jnp.sin(y)) + jnp.vdot(stats.prob_sum, stats.counts), (y, stats)

    return module, jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))


@functools.cache
def mixture_on_one_device(routing):
    module, run = mixture(routing)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
    ids = jnp.ones((B, T), int)
    boxed = jax.eval_shape(lambda: module.init(jax.random.key(0), x, ids > 0, positions=ids, segment_ids=ids))
    draw = lambda p: jnp.asarray(0.5 * rng.normal(size=p.shape), p.dtype)  # noqa: E731
    params = jax.tree.map(draw, nn.meta.unbox(boxed)["params"])
    return params, x, run(params, x)


@pytest.mark.parametrize(
    ("routing", "name"),
    [(routing, "data 2, expert 4") for routing in ROUTINGS] + [("capacity", "fsdp 2, expert 2, tensor 2")],
)
def test_a_mixture_equals_one_device(routing, name):
    """Output, routing statistics and gradients, dropless and with capacities, which count by sequence."""
    params, x, expected = mixture_on_one_device(routing)
    assert (expected[0][1][1].dropped > 0) == (routing in ("capacity", "rerouted"))
    _, run = mixture(routing, MeshExperts(make_mesh(MESHES[name])))
    assert_equal(run(params, x), expected)


@pytest.mark.parametrize(("routing", "rows"), [("dropless", 4 * 8), ("capacity", 4 * 2)])
def test_a_capacity_makes_the_exchange_smaller(routing, rows):
    """4 parts of the experts, 8 tokens a device, and with a capacity 2 of them for any expert."""
    params, x, _ = mixture_on_one_device(routing)
    _, run = mixture(routing, MeshExperts(make_mesh(MESHES["data 2, expert 4"])))
    lines = run.lower(params, x).as_text().splitlines()
    sent = {re.search(r"-> tensor<(\d+)x8xf32>", line) for line in lines if "stablehlo.all_to_all" in line} - {None}
    assert {int(found[1]) for found in sent} == {rows}


def as_a_receiver_sees_it(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What JAX's documentation says of `ragged_all_to_all`, which CPUs lack, by gathering everything."""
    me = jax.lax.axis_index(axis_name)
    gather = lambda a: jax.lax.all_gather(a, axis_name)  # noqa: E731
    sent, starts, sizes, targets = map(gather, (operand, input_offsets, send_sizes, output_offsets))
    at = jnp.arange(output.shape[0])
    for sender in range(sent.shape[0]):
        start, size, target = starts[sender, me], sizes[sender, me], targets[sender, me]
        mine = (at >= target) & (at < target + size)
        rows = sent[sender][jnp.clip(start + at - target, 0, operand.shape[0] - 1)]
        rows = jnp.where(size == recv_sizes[sender], rows, jnp.nan)
        output = jnp.where(mine[:, None], rows, output)
    return output


@pytest.mark.parametrize("name", ["data 2, expert 4", "fsdp 2, expert 2, tensor 2"])
def test_the_ragged_exchange_equals_one_device(name, monkeypatch):
    """What a TPU would run, with the collective that CPUs lack put together from others."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", as_a_receiver_sees_it)
    monkeypatch.setattr("zoo.parallel.experts.RAGGED_PLATFORMS", ("cpu",))
    assert_equal(values_and_grads(MeshExperts(make_mesh(MESHES[name])), make_inputs()), on_one_device())


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_ragged_exchange_lowers(platform, monkeypatch):
    monkeypatch.setattr("zoo.parallel.experts.RAGGED_PLATFORMS", ("cpu",))
    run = jax.jit(jax.grad(lambda *a: loss(MeshExperts(make_mesh(MESHES["data 2, expert 4"])), *a)[0], (0, 2, 3)))
    text = run.trace(*make_inputs()).lower(lowering_platforms=(platform,)).as_text()
    # Tokens there, and their gradients back and there; the output itself is not needed.
    assert len(re.findall(r"custom_call @ragged_all_to_all", text)) >= 3


@pytest.mark.parametrize("indices", [[[0, 1]] * N, [[3, 4]] * N, [[4, 4]] * N], ids=["two", "one", "none"])
def test_all_tokens_to_few_experts(indices):
    """As uneven as can be: nothing is dropped, and nothing is made of no tokens at all."""
    x, _, weights, params = make_inputs()
    inputs = (x, jnp.array(indices), weights, params)
    found = values_and_grads(MeshExperts(make_mesh(MESHES["data 2, expert 4"])), inputs)
    assert_equal(found, values_and_grads(sorted_experts, inputs))


def test_bfloat16_loses_no_more_than_on_one_device():
    """Results of a token from several devices are added in float32."""
    x, indices, weights, params = make_inputs()
    half = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)  # noqa: E731
    inputs = (half(x), indices, weights, half(params))
    exact = jax.tree.leaves(on_one_device()[1])
    alone = jax.tree.leaves(values_and_grads(sorted_experts, inputs)[1])
    found = jax.tree.leaves(values_and_grads(MeshExperts(make_mesh(MESHES["data 2, expert 4"])), inputs)[1])
    error = lambda a, b: np.linalg.norm(np.float32(a) - b)  # noqa: E731
    for a, b, c in zip(found, alone, exact, strict=True):
        assert a.dtype == b.dtype and error(a, c) <= 2 * error(b, c)


def test_no_device_gathers_the_tokens():
    mesh = make_mesh(MESHES["data 8"])
    x, indices, weights, params = make_inputs()
    rows = NamedSharding(mesh, P(("data", "fsdp", "expert")))
    shardings = (rows, rows, rows, NamedSharding(mesh, P()))
    forward = jax.jit(lambda *inputs: loss(MeshExperts(mesh), *inputs)[1], in_shardings=shardings)
    assert "all-gather" not in forward.lower(x, indices, weights, params).compile().as_text()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MeshConfig(data=1, expert=8), "mesh.expert=8 does not divide model.moe.n_experts=4; choose a divisor of 4"),
        (MeshConfig(data=1, tensor=8), "mesh.tensor=8 does not divide model.moe.d_ff=12; choose a divisor of 12"),
    ],
)
def test_what_does_not_divide(config, reason):
    with pytest.raises(ConfigError, match=reason):
        MeshExperts(make_mesh(config))(*make_inputs(), HiddenUnits("silu"))


def test_is_a_value():
    one, other = (MeshExperts(make_mesh(MESHES["data 8"])) for _ in range(2))
    assert one == other and hash(one) == hash(other)


def test_one_device_needs_no_mesh():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert_equal(values_and_grads(MeshExperts(mesh), make_inputs()), on_one_device())
