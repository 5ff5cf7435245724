import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.tiny import Setup, batch, experiment
from zoo.layers.logical import is_spec
from zoo.objectives import add, sums, total_loss
from zoo.train.state import TrainState, step_key
from zoo.train.step import clip, gradients, make_eval_step, measure


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


@pytest.mark.parametrize("mixture", ["sparse", "dense", "soft", "none"])
def test_micro_batches_give_the_gradient_of_the_whole_batch(mixture):
    s = setup(mixture, model={"init_std": 0.2})
    params = s.state().params
    key = step_key(0, 0)
    whole = jax.jit(lambda p: gradients(s.model, p, batch(0), key, 1, s.layout))
    want, total = whole(params)
    assert len(set(np.asarray((batch(0).labels >= 0).reshape(4, 2, -1).sum((0, 2))))) == 2  # unequal parts
    for n in (2, 4) if mixture == "dense" else (4,):
        got, parts = jax.jit(lambda p, n=n: gradients(s.model, p, batch(0), key, n, s.layout))(params)
        assert_trees_close(got, want, atol=2e-6, rtol=1e-4)
        assert_trees_close(parts, total, rtol=1e-5, atol=1e-4)


def test_the_gradient_is_that_of_the_stated_objective():
    """Summed by hand over two parts: nothing in the step's own machinery is used."""
    s = setup("dense", model={"init_std": 0.2})
    params = s.state().params

    def objective(params):
        few, many = (jax.tree.map(lambda x, part=part: x[part], batch(0)) for part in (slice(3), slice(3, 8)))
        return total_loss(add(sums(s.model, params, few), sums(s.model, params, many)), s.model.config)

    got, _ = jax.jit(lambda p: gradients(s.model, p, batch(0), step_key(0, 0), 2, s.layout))(params)
    assert_trees_close(got, jax.jit(jax.grad(objective))(params), atol=2e-6, rtol=1e-4)


def test_the_balance_loss_weighs_the_same_in_micro_batches():
    """The gradient of the auxiliary losses alone, found as the difference to a model without them."""
    with_loss, without = (
        setup("dense", model={"init_std": 0.2, "moe": {"balance_weight": weight, "z_weight": 0.0}}) for weight in (1, 0)
    )
    params = with_loss.state().params

    def difference(n):
        grads = [gradients(s.model, params, batch(0), step_key(0, 0), n, s.layout)[0] for s in (with_loss, without)]
        return jax.tree.map(jnp.subtract, *grads)

    want = jax.jit(difference, static_argnums=0)(1)
    router = want["stage_0"]["block_0"]["moe"]["router"]["w"]
    assert np.abs(router).max() > 1e-3
    assert_trees_close(jax.jit(difference, static_argnums=0)(4), want, atol=2e-6)


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


def test_training_lowers_the_loss_and_compiles_once():
    s = setup("sparse", optimizer={"name": "muon"})
    state = s.state()
    losses = []
    for _ in range(20):
        state, metrics = s.step(state, batch(0))
        losses.append(float(metrics["train/loss"]))
    assert losses[-1] < losses[0] - 0.5
    assert s.step._cache_size() == 1


def test_a_gradient_that_is_not_finite_changes_no_bit():
    s = setup("none", optimizer={"name": "muon"}, train={"micro_batches": 2})
    state, _ = s.run(2)
    kept = jax.device_get(state)
    poisoned = batch(2)._replace(tokens=jnp.full_like(batch(2).tokens, 10**6))  # unknown tokens embed as NaN
    for n in (1, 2):
        state, metrics = s.step(state, poisoned)
        assert int(metrics["skipped"]) == int(metrics["skipped_in_a_row"]) == n
    assert_same_bits((state.params, state.opt_state), (kept.params, kept.opt_state))
    assert int(state.step) == 4
    state, metrics = s.step(state, batch(4))
    assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (2, 0)
    assert np.isfinite(float(metrics["train/grad_norm"]))


def test_low_precision_parameters_keep_float32_moments():
    s = setup("none", model={"param_dtype": "bfloat16", "compute_dtype": "bfloat16"})
    state, losses = s.run(2)
    floats = [x.dtype for x in jax.tree.leaves(state.opt_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floats and set(floats) == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert np.isfinite(losses).all()


# --------------------------------------------------------------------------------- sharding, law 7

MESHES = [
    {"data": 2, "fsdp": 4, "zero": 1},
    {"data": 1, "fsdp": 4, "tensor": 2, "zero": 2},
    {"data": 2, "fsdp": 2, "expert": 2, "zero": 3},
    {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2, "zero": 3},
]


@pytest.fixture(scope="module")
def alone():
    return setup("sparse", optimizer={"name": "muon"}).run(20)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "-".join(f"{k}{v}" for k, v in m.items()))
def test_eight_devices_train_like_one(mesh, alone):
    s = setup("sparse", n_devices=8, optimizer={"name": "muon"}, mesh=mesh)
    state, losses = s.run(20)
    np.testing.assert_allclose(losses, alone[1], atol=1e-4)
    assert_placed_as_promised(state, s.layout.state)


def test_micro_batches_on_a_mesh(alone):
    mesh = {"data": 2, "fsdp": 2, "tensor": 2, "zero": 2}
    s = setup("sparse", n_devices=8, optimizer={"name": "muon"}, mesh=mesh, train={"micro_batches": 2})
    np.testing.assert_allclose(s.run(3)[1], alone[1][:3], atol=1e-4)


def assert_placed_as_promised(state: TrainState, shardings: TrainState):
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def bytes_on_a_device(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def test_zero_splits_what_it_promises():
    """Bytes on the first device as a share of all, with everything divisible by the 8 parts of fsdp."""
    share = {}
    for zero in (1, 2, 3):
        s = setup("none", n_devices=8, mesh={"data": 1, "fsdp": 8, "zero": zero})
        state = s.state()
        whole = [sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (state.params, state.opt_state)]
        grads = jax.jit(lambda p, s=s: gradients(s.model, p, batch(0), step_key(0, 0), 1, s.layout)[0])(state.params)
        held = [bytes_on_a_device(tree) for tree in (state.params, state.opt_state, grads)]
        share[zero] = [round(h / w, 2) for h, w in zip(held, [*whole, whole[0]], strict=True)]
    assert share == {1: [1, 0.13, 1], 2: [1, 0.13, 0.13], 3: [0.13, 0.13, 0.13]}


# ------------------------------------------------------------------------------- metrics, evaluation


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


def test_evaluation_does_not_depend_on_the_batch_size():
    s = setup("sparse")
    params = s.state().params
    evaluate = make_eval_step(s.model, s.layout)
    rows = batch(0, 8)

    def total(size):
        parts = [jax.tree.map(lambda x, i=i: x[i : i + size], rows) for i in range(0, 8, size)]
        results = [jax.device_get(evaluate(params, part)) for part in parts]
        return np.sum([np.float64(r).sum(-1) for r in results], axis=0)

    assert total(8)[1] == (rows.labels >= 0).sum()
    np.testing.assert_allclose(total(2), total(8), rtol=1e-6)
    np.testing.assert_allclose(total(1), total(8), rtol=1e-6)


# ------------------------------------------------------------------------------------ resume, law 8


def test_a_run_cut_in_two_ends_with_the_same_bits():
    def make():
        return setup("dense", model={"dropout": 0.1}, optimizer={"name": "muon"}, train={"micro_batches": 2})

    want, _ = make().run(6)
    half, _ = make().run(3)
    again = make()
    state = jax.device_put(jax.device_get(half), again.layout.state)
    assert_same_bits(again.run(3, state)[0], want)
