import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.tiny import Setup, batch, experiment, model_config
from zoo.layers.logical import is_spec
from zoo.models.decoder import build
from zoo.objectives import Sums, sums, total_loss
from zoo.parallel.rules import device_bytes
from zoo.train import step as step_module
from zoo.train.schedule import factor
from zoo.train.state import TrainState, abstract_state, step_key
from zoo.train.step import clip, gradients, measure

pytestmark = pytest.mark.xdist_group("step")  # one worker, so that its fixtures are compiled once


def setup(*args, n_devices=1, **settings):
    return Setup(experiment(*args, **settings), jax.devices()[:n_devices])


def assert_trees_close(got, want, **tolerance):
    for path, leaf in jax.tree_util.tree_leaves_with_path(want):
        other = dict(jax.tree_util.tree_leaves_with_path(got))[path]
        np.testing.assert_allclose(other, leaf, err_msg=jax.tree_util.keystr(path), **tolerance)


def flat(tree):
    return jax.tree.leaves(tree, is_leaf=is_spec)


def assert_same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# ------------------------------------------------------------------------------- accumulation, law 6


def test_the_gradient_of_micro_batches_is_that_of_the_stated_objective():
    """Summed by hand over two parts: nothing in the step's own machinery is used. tests/laws has every mixture."""
    mixture = {"balance_weight": 1.0, "z_weight": 0.1}
    s = setup("dense", model={"init_std": 0.2, "logit_z_weight": 0.1, "moe": mixture})
    assert len(set(np.asarray((batch(0).labels >= 0).reshape(4, 2, -1).sum((0, 2))))) == 2  # unequal parts
    params = s.state().params

    def objective(params):
        few, many = (jax.tree.map(lambda x, part=part: x[part], batch(0)) for part in (slice(3), slice(3, 8)))
        total = jax.tree.map(jnp.add, sums(s.model, params, few), sums(s.model, params, many))
        return total_loss(total, s.model.config)

    got, _ = jax.jit(lambda p: gradients(s.model, p, batch(0), step_key(0, 0), 2, s.layout))(params)
    assert_trees_close(got, jax.jit(jax.grad(objective))(params), atol=2e-6, rtol=1e-4)


def test_dropout_differs_between_steps_and_micro_batches():
    s = setup("none", model={"dropout": 0.5})
    params = s.state().params
    same = jax.tree.map(lambda x: jnp.concatenate([x[:1]] * 4), batch(0))  # two micro-batches of equal rows
    run = jax.jit(lambda rows, key, n: gradients(s.model, params, rows, key, n, s.layout)[1].loss, static_argnums=2)
    loss = lambda step: run(same, step_key(0, step), 2)  # noqa: E731
    assert float(loss(0)) == float(loss(0)) != float(loss(1))
    one = run(jax.tree.map(lambda x: x[:2], same), step_key(0, 0), 1)
    assert float(loss(0)) != pytest.approx(2 * float(one))  # the second part has masks of its own


# ---------------------------------------------------------------------------------------- the update


def test_clipping_by_hand():
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    clipped, norm = clip(grads, 1.0)
    assert float(norm) == 5
    np.testing.assert_allclose(clipped["a"], [0.6, 0])
    np.testing.assert_allclose(clipped["b"], [[0.8]])
    assert_same_bits(clip(grads, 5.0)[0], grads)
    assert_same_bits(clip(grads, None)[0], grads)


def test_first_update_by_hand():
    """Adam's first direction is the sign of the gradient: a step of the warmed-up rate, plus decay."""
    s = setup("none", optimizer={"warmup_steps": 4, "weight_decay": 0.1, "eps": 1e-20})
    before = jax.device_get(s.state().params)
    grads, _ = jax.jit(lambda p: gradients(s.model, p, batch(0), step_key(0, 0), 1, s.layout))(before)
    after, metrics = s.step(s.state(), batch(0))
    rate = 1e-2 / 4
    assert float(metrics["learning_rate"]) == pytest.approx(rate)
    moved = jax.tree.map(np.subtract, jax.device_get(after.params), before)
    for move, old, g, spec in zip(*map(flat, (moved, before, grads, s.specs)), strict=True):
        decay = 0.1 if spec.role == "matrix" else 0.0
        sure = np.abs(g) > 1e-9
        np.testing.assert_allclose(move[sure], -rate * (np.sign(g) + decay * old)[sure], atol=2e-6)
    assert int(after.step) == 1


@pytest.fixture(scope="module")
def muon():
    """With all that may carry something from one step to the next: momentum, moments, masks, micro-batches.

    Its schedule, which every trace of the step asks once, may be asked once.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "factor", lambda *args: chex.assert_max_traces(factor(*args), n=1))
        return setup("dense", model={"dropout": 0.1}, optimizer={"name": "muon"}, train={"micro_batches": 2})


def test_training_lowers_the_loss_and_compiles_once(muon):
    state, losses = muon.state(), []
    for _ in range(20):
        state, metrics = muon.step(state, batch(0))
        losses.append(float(metrics["train/loss"]))
    assert losses[-1] < losses[0] - 0.5
    assert float(metrics["muon_learning_rate"]) == pytest.approx(2 * float(metrics["learning_rate"]))  # 0.02 and 0.01


def test_a_run_cut_in_two_ends_with_the_same_bits(muon):
    """Law 8; the second part gets its state from the host, as from a checkpoint."""
    want, _ = muon.run(6)
    half, _ = muon.run(3)
    state = jax.device_put(jax.device_get(half), muon.layout.state)
    assert_same_bits(muon.run(3, state)[0], want)


def test_a_gradient_that_is_not_finite_changes_no_bit(muon):
    state, _ = muon.run(2)
    kept = jax.device_get(state)
    poisoned = batch(2)._replace(tokens=jnp.full_like(batch(2).tokens, 10**6))  # unknown tokens embed as NaN
    for n in (1, 2):
        state, metrics = muon.step(state, poisoned)
        assert int(metrics["skipped"]) == int(metrics["skipped_in_a_row"]) == n
    assert_same_bits((state.params, state.opt_state), (kept.params, kept.opt_state))
    assert int(state.step) == 4
    state, metrics = muon.step(state, batch(4))
    assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (2, 0)
    assert np.isfinite(float(metrics["train/grad_norm"]))


def test_a_gradient_whose_norm_overflows_changes_no_bit(muon):
    """Every number in it is finite, and so is the loss; clipping by an infinite norm would make it zero."""
    huge = jax.device_get(muon.state())
    huge.params["final_norm"]["scale"] = huge.params["final_norm"]["scale"] * np.float32(1e25)
    state, metrics = muon.step(jax.device_put(huge, muon.layout.state), batch(0))
    assert np.isfinite(metrics["train/loss"]) and np.isposinf(metrics["train/grad_norm"])
    assert int(metrics["skipped"]) == 1
    assert_same_bits((state.params, state.opt_state), (huge.params, huge.opt_state))


def test_the_norm_is_finite_where_all_gradients_are():
    """A step looks at the norm alone, so one bad number anywhere has to reach it."""
    grads = {"a": jnp.ones(3), "b": jnp.zeros((2, 2))}
    assert np.isfinite(clip(grads, 1.0)[1])
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        assert not np.isfinite(clip(grads | {"b": grads["b"].at[1, 0].set(bad)}, 1.0)[1])


def test_low_precision_parameters_keep_float32_moments():
    s = setup("none", model={"param_dtype": "bfloat16", "compute_dtype": "bfloat16"})
    state, losses = s.run(2)
    floats = [x.dtype for x in jax.tree.leaves(state.opt_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floats and set(floats) == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert np.isfinite(losses).all()


# ------------------------------------------------------------------------- balance without a loss

RATE = 0.125  # exact in sums
SELECTION = {"score": "sigmoid", "selection_bias": True, "selection_bias_rate": RATE, "n_null_experts": 2}


def biased(n_devices=1, **settings):
    return setup("sparse", n_devices=n_devices, model={"moe": SELECTION}, optimizer={"weight_decay": 0.5}, **settings)


def selection_bias(state):
    return np.asarray(state.params["stage_0"]["block_0"]["moe"]["router"]["selection_bias"])


def expected_bias(s, state, rows):
    """The bias after a step, from the counts of the whole batch; the two null experts share their load."""
    counts = np.float64(jax.jit(lambda p: sums(s.model, p, rows))(state.params).routing[0][0].counts)
    counts[:, 4:] = counts[:, 4:].mean(1, keepdims=True)
    return selection_bias(state) + RATE * np.sign(counts.mean(1, keepdims=True) - counts)


@pytest.fixture(scope="module")
def selecting():
    return biased()


def test_the_selection_bias_follows_the_load_and_nothing_else(selecting):
    """Neither gradient, nor decay, nor the optimizer's moments; and no step that is skipped."""
    state = selecting.state()
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)]
    assert any("router" in name for name in names) and not any("selection_bias" in name for name in names)
    for n in range(3):
        want = expected_bias(selecting, state, batch(n))
        state, _ = selecting.step(state, batch(n))
        np.testing.assert_array_equal(selection_bias(state), want)
    assert np.any(want) and want.shape == (2, 6)
    kept = selection_bias(state)
    state, metrics = selecting.step(state, batch(3)._replace(tokens=jnp.full_like(batch(3).tokens, 10**6)))
    assert int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(selection_bias(state), kept)


def test_the_selection_bias_has_no_gradient(selecting):
    params = selecting.state().params
    router = params["stage_0"]["block_0"]["moe"]["router"]
    router["selection_bias"] = jax.random.normal(jax.random.key(0), router["selection_bias"].shape)
    run = jax.jit(lambda p: gradients(selecting.model, p, batch(0), step_key(0, 0), 1, selecting.layout)[0])
    grads = run(params)["stage_0"]["block_0"]["moe"]["router"]
    assert not np.any(grads["selection_bias"]) and np.any(grads["w"])


@pytest.mark.parametrize(
    "n_devices, settings",
    [
        (1, {"train": {"micro_batches": 4}}),
        (8, {"mesh": {"data": 2, "fsdp": 2, "expert": 2, "zero": 3}, "train": {"micro_batches": 2}}),
    ],
    ids=["micro-batches", "mesh"],
)
def test_the_selection_bias_sees_the_whole_batch(selecting, n_devices, settings):
    """Once a step, of the counts of all micro-batches and devices."""
    want, _ = selecting.run(3)
    found, _ = biased(n_devices, **settings).run(3)
    np.testing.assert_array_equal(selection_bias(found), selection_bias(want))


# --------------------------------------------------------------------------------- sharding, law 7

MESHES = [
    ({"data": 2, "fsdp": 4, "zero": 1}, 1),
    ({"data": 1, "fsdp": 4, "tensor": 2, "zero": 2}, 2),
    ({"data": 1, "fsdp": 2, "tensor": 2, "expert": 2, "zero": 3}, 1),
]


@pytest.fixture(scope="module")
def alone():
    return setup("sparse", optimizer={"name": "muon"}).run(20)


@pytest.mark.parametrize("mesh, micro_batches", MESHES, ids=["zero1", "zero2", "zero3"])
def test_eight_devices_train_like_one(mesh, micro_batches, alone):
    train = {"micro_batches": micro_batches}
    s = setup("sparse", n_devices=8, optimizer={"name": "muon"}, mesh=mesh, train=train)
    state, losses = s.run(20)
    np.testing.assert_allclose(losses, alone[1], atol=1e-4)
    assert_placed_as_promised(state, s.layout.state)


def assert_placed_as_promised(state: TrainState, shardings: TrainState):
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_zero_splits_what_it_promises():
    """Bytes on a device as a share of all: parameters, gradients, optimizer, with fsdp=8 dividing everything."""
    share = {}
    for zero in (1, 2, 3):
        s = setup("none", n_devices=8, mesh={"data": 1, "fsdp": 8, "zero": zero})
        state = abstract_state(s.specs, s.optimizer)
        placed = s.layout.state
        trees = (state.params, placed.params), (state.params, s.layout.grads), (state.opt_state, placed.opt_state)
        share[zero] = [device_bytes(*tree) / sum(x.size * 4 for x in jax.tree.leaves(tree[0])) for tree in trees]
    part = pytest.approx(1 / 8, abs=1e-3)  # a counter or two is on every device
    assert share == {1: [1, 1, part], 2: [1, part, part], 3: [part, part, part]}


def test_gradients_lie_where_zero_puts_them():
    s = setup("none", n_devices=8, mesh={"data": 1, "fsdp": 8, "zero": 2})
    params = s.state().params
    grads, _ = jax.jit(lambda p: gradients(s.model, p, batch(0), step_key(0, 0), 1, s.layout))(params)
    for leaf, sharding in zip(jax.tree.leaves(grads), jax.tree.leaves(s.layout.grads), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


# ------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_the_loss_is_the_cross_entropy_alone(weight):
    model = build(model_config("none", logit_z_weight=weight))
    total = Sums(*map(jnp.float32, (9, 6, 12, 4)), ((None,),))
    got = measure(total, model)
    assert got["train/loss"] == 1.5
    assert got.get("train/logit_z_loss") == (3 if weight else None)
    assert total_loss(total, model.config) == 9 / 4


def test_metrics_of_the_routing_by_hand():
    s = setup("sparse")
    total = jax.jit(lambda p: sums(s.model, p, batch(0)))(s.state().params)
    stats = total.routing[0][0]
    got = jax.device_get(measure(total, s.model))
    counts, tokens = np.float64(stats.counts), int((batch(0).segment_ids > 0).sum())
    np.testing.assert_allclose(counts.sum(-1), 2 * tokens)
    np.testing.assert_allclose(got["moe/load"], counts / (2 * tokens), rtol=1e-6)
    np.testing.assert_allclose(got["moe/max_load"], counts.max(-1) / counts.mean(-1), rtol=1e-6)
    np.testing.assert_allclose(got["moe/min_load"], counts.min(-1) / counts.mean(-1), rtol=1e-6)
    np.testing.assert_allclose(got["moe/entropy"], stats.entropy_sum / tokens, rtol=1e-6)
    np.testing.assert_array_equal(got["moe/dropped"], [0, 0])
    balance = 4 / 2 * (counts / tokens * np.float64(stats.prob_sum) / tokens).sum(-1).mean()
    np.testing.assert_allclose(got["train/balance_loss"], balance, rtol=1e-5)
    assert got["train/tokens"] == (batch(0).labels >= 0).sum()


def test_the_share_of_null_experts_is_measured(selecting):
    total = jax.jit(lambda p: sums(selecting.model, p, batch(0)))(selecting.state().params)
    got = jax.device_get(measure(total, selecting.model))
    counts = np.float64(total.routing[0][0].counts)
    np.testing.assert_allclose(got["moe/null"], counts[:, 4:].sum(1) / counts.sum(1), rtol=1e-6)
    np.testing.assert_allclose(got["moe/load"].sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(got["moe/max_load"], counts[:, :4].max(1) / counts[:, :4].mean(1), rtol=1e-6)
