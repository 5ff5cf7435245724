import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests.train import tiny
from zoo.config import OptimizerConfig
from zoo.layers.logical import ParamSpec, is_spec
from zoo.models.decoder import build
from zoo.parallel.mesh import make_mesh
from zoo.parallel.rules import path_name
from zoo.train.optimizer import QUINTIC, decay_mask, make_optimizer, orthogonalize
from zoo.train.state import make_layout


def spec(shape, axes, role="matrix", inputs=(), outputs=()):
    return ParamSpec(jax.ShapeDtypeStruct(shape, jnp.float32), axes, role, inputs, outputs)


SPECS = {
    "query": spec((2, 6, 2, 4), ("layers", "embed", "heads", "head_dim"), "matrix", ("embed",), ("heads", "head_dim")),
    "out": spec((2, 2, 4, 6), ("layers", "heads", "head_dim", "embed"), "matrix", ("heads", "head_dim"), ("embed",)),
    "up": spec((2, 3, 6, 10), ("layers", "expert", "embed", "mlp"), "matrix", ("embed",), ("mlp",)),
    "router": spec((2, 6, 3), ("layers", "embed", "expert"), "router", ("embed",), ("expert",)),
    "embed": spec((7, 6), ("vocab", "embed"), "embedding"),
    "head": spec((6, 7), ("embed", "vocab"), "head", ("embed",), ("vocab",)),
    "scale": spec((2, 6), ("layers", "embed"), "scale"),
    "bias": spec((2, 6), ("layers", "embed"), "bias"),
    "selection": spec((2, 3), ("layers", "expert"), "selection_bias"),
}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(s.shape).astype(np.float32) for name, s in SPECS.items()}


def quintic(matrix, steps=5):
    """Keller Jordan's iteration on one matrix [fan_in, fan_out], float64, with his scale for the shape."""
    x = np.float64(matrix)
    rows, columns = x.shape
    x = x / np.sqrt((x**2).sum())
    for _ in range(steps):
        gram = x @ x.T
        x = QUINTIC[0] * x + QUINTIC[1] * gram @ x + QUINTIC[2] * gram @ gram @ x
    return x * np.sqrt(max(1, columns / rows))


def orthogonal(name, gradient):
    """Matrix by matrix, over layers and experts."""
    shape = {"query": (6, 8), "out": (8, 6), "up": (6, 10)}[name]
    matrices = np.float64(gradient).reshape(-1, *shape)
    return np.stack([quintic(m) for m in matrices]).reshape(gradient.shape)


@pytest.mark.parametrize("name", ["query", "out", "up"])
def test_every_matrix_of_a_stack_is_orthogonalized_by_itself(name):
    gradient = draw(0)[name]
    np.testing.assert_allclose(orthogonalize(jnp.asarray(gradient), SPECS[name]), orthogonal(name, gradient), atol=2e-5)


def test_axes_in_any_order_make_the_same_matrices():
    gradient = draw(1)["up"]
    turned = spec((10, 2, 6, 3), ("mlp", "layers", "embed", "expert"), "matrix", ("embed",), ("mlp",))
    got = orthogonalize(jnp.asarray(gradient.transpose(3, 0, 2, 1)), turned)
    np.testing.assert_allclose(got.transpose(1, 3, 2, 0), orthogonal("up", gradient), atol=2e-5)


def test_singular_values_come_near_one():
    gradient = draw(2)["up"]
    values = np.linalg.svd(np.asarray(orthogonalize(jnp.asarray(gradient), SPECS["up"])) / np.sqrt(10 / 6))[1]
    assert values.min() > 0.5 and values.max() < 1.3


def test_an_expert_without_a_gradient_stays_finite():
    assert not np.asarray(orthogonalize(jnp.zeros((2, 3, 6, 10)), SPECS["up"])).any()


def test_only_what_multiplies_activations_decays():
    assert {name for name, decayed in decay_mask(SPECS).items() if decayed} == {"query", "out", "up", "router", "head"}


def run(config, n_steps, params):
    optimizer = make_optimizer(config, SPECS)
    state = optimizer.init(params)
    for step in range(n_steps):
        updates, state = optimizer.update(draw(10 + step), state, params)
        params = jax.tree.map(lambda p, u: p - 0.5 * u, params, updates)
    return params


def adamw(config, n_steps, p, name, decay):
    """Loshchilov and Hutter's algorithm 2 with bias correction, float64."""
    p, m, v = np.float64(p), 0.0, 0.0
    for step in range(n_steps):
        g = np.float64(draw(10 + step)[name])
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g**2
        direction = m / (1 - config.beta1 ** (step + 1))
        direction = direction / (np.sqrt(v / (1 - config.beta2 ** (step + 1))) + config.eps)
        p = p - 0.5 * config.learning_rate * (direction + decay * p)
    return p


def muon(config, n_steps, p, name):
    p, m = np.float64(p), 0.0
    for step in range(n_steps):
        g = np.float64(draw(10 + step)[name])
        m = config.muon_momentum * m + (1 - config.muon_momentum) * g
        direction = orthogonal(name, config.muon_momentum * m + (1 - config.muon_momentum) * g)
        p = p - 0.5 * config.muon_learning_rate * (direction + config.weight_decay * p)
    return p


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_three_steps_equal_the_papers_algorithm(name):
    peak = {"muon_learning_rate": 0.05} if name == "muon" else {}
    config = OptimizerConfig(name=name, learning_rate=0.03, weight_decay=0.2, **peak)
    params = draw(3)
    got = run(config, 3, params)
    for leaf in SPECS:
        if name == "muon" and SPECS[leaf].role == "matrix":
            want = muon(config, 3, params[leaf], leaf)
        elif leaf == "selection":
            want = params[leaf]
        else:
            want = adamw(config, 3, params[leaf], leaf, 0.2 if decay_mask(SPECS)[leaf] else 0.0)
        np.testing.assert_allclose(got[leaf], want, atol=3e-6, err_msg=leaf)


def test_muon_agrees_with_optax_on_a_flat_matrix():
    """Another implementation, other conventions for the momentum: after one step the direction is the same."""
    gradient = {"w": jnp.asarray(draw(4)["head"])}
    other = optax.contrib.scale_by_muon(weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers(0, 1)})
    want, _ = other.update(gradient, other.init(gradient))
    ours = orthogonalize(gradient["w"], spec((6, 7), ("embed", "mlp"), "matrix", ("embed",), ("mlp",)))
    np.testing.assert_allclose(ours, want["w"] * np.sqrt(7 / 6), atol=2e-5)


def updates_of(config, n_steps=2):
    """The optimizer's last update after some gradients, and its state."""
    optimizer = make_optimizer(config, SPECS)
    params = jax.tree.map(jnp.asarray, draw(9))
    state = optimizer.init(params)
    for n in range(n_steps):
        updates, state = optimizer.update(jax.tree.map(jnp.asarray, draw(n)), state, params)
    return updates, state, params


def test_lion_takes_signs_of_the_interpolated_momentum():
    config = OptimizerConfig(name="lion", learning_rate=0.5, beta1=0.9, beta2=0.8, weight_decay=0.0)
    updates, _, _ = updates_of(config)
    for name, update in updates.items():
        if name == "selection":
            continue
        momentum = 0.2 * draw(0)[name]
        np.testing.assert_array_equal(update, 0.5 * np.sign(0.9 * momentum + np.float32(0.1) * draw(1)[name]))


WIDE = {
    "query": spec((2, 160, 4, 40), ("layers", "embed", "heads", "mlp"), "matrix", ("embed",), ("heads", "mlp")),
    "out": spec((1, 4, 33, 140), ("layers", "heads", "mlp", "embed"), "matrix", ("heads", "mlp"), ("embed",)),
    "up": spec((2, 3, 160, 130), ("layers", "expert", "embed", "mlp"), "matrix", ("embed",), ("mlp",)),
    "table": spec((150, 160), ("vocab", "embed"), "embedding"),
    "thin": spec((2, 200, 3), ("layers", "embed", "expert"), "router", ("embed",), ("expert",)),
    "scale": spec((130, 160), ("layers", "embed"), "scale"),
}
MATRICES = {"query": (160, 160), "out": (132, 140), "up": (160, 130), "table": (150, 160)}  # that are factored


def adafactor(gradients):
    """The last direction for one matrix, by algorithms 4 and 6 of arXiv 1804.04235, float64."""
    rows = columns = 0.0
    for t, g in enumerate(np.float64(gradients), 1):
        kept, square = 1 - t**-0.8, g**2 + 1e-30
        rows = kept * rows + (1 - kept) * square.mean(1)
        columns = kept * columns + (1 - kept) * square.mean(0)
        u = g / np.sqrt(rows[:, None] * columns[None] / rows.mean())
    return u / max(1, np.sqrt((u**2).mean()))


def unfactored(gradients):
    squares = 0.0
    for t, g in enumerate(np.float64(gradients), 1):
        squares = (1 - t**-0.8) * squares + t**-0.8 * (g**2 + 1e-30)
        u = g / np.sqrt(squares)
    return u / max(1, np.sqrt((u**2).mean()))


def test_adafactor_factors_the_matrix_of_each_product_and_no_other_axes():
    """Layers and experts stay apart, heads and their widths are columns together; the update by the paper's formula."""
    optimizer = make_optimizer(OptimizerConfig(name="adafactor", learning_rate=1.0, weight_decay=0.0), WIDE)
    rng = np.random.default_rng(0)
    grads = [{name: rng.standard_normal(s.shape).astype(np.float32) for name, s in WIDE.items()} for _ in range(2)]
    grads[0]["thin"][:] *= 3  # so that its second direction is cut to a root mean square of less than 1
    state = optimizer.init(jax.tree.map(jnp.asarray, grads[0]))
    for g in grads:
        updates, state = optimizer.update(jax.tree.map(jnp.asarray, g), state, g)
    for name, update in updates.items():
        of_each = MATRICES.get(name, WIDE[name].shape[1:])
        given = np.stack([g[name] for g in grads]).reshape(2, -1, *of_each)
        rule = adafactor if name in MATRICES else unfactored
        want = np.stack([rule(given[:, n]) for n in range(given.shape[1])])
        np.testing.assert_allclose(np.asarray(update).reshape(want.shape), want, rtol=2e-4, atol=1e-4, err_msg=name)


def test_adafactor_keeps_rows_and_columns_in_the_dimensions_of_their_parameter():
    optimizer = make_optimizer(OptimizerConfig(name="adafactor"), WIDE)
    state = jax.eval_shape(optimizer.init, jax.tree.map(lambda s: s.value, WIDE, is_leaf=lambda s: hasattr(s, "axes")))
    kept = {"query": {(2, 160), (2, 4, 40)}, "out": {(1, 4, 33), (1, 140)}, "up": {(2, 3, 160), (2, 3, 130)}}
    kept |= {"table": {(150,), (160,)}, "thin": {(2, 200, 3)}, "scale": {(130, 160)}}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = getattr(path[-1], "key", None)
        assert name is None or leaf.shape in kept[name] or leaf.shape[-1] == 1, (name, leaf.shape)


def test_adafactors_state_lies_on_a_mesh_as_its_parameters_do():
    settings = tiny.experiment(
        model={"d_model": 128, "vocab_size": 192, "n_layers": 1, "moe": {"d_ff": 160}},
        mesh={"data": 1, "fsdp": 2, "tensor": 2, "expert": 2, "zero": 1},
        optimizer={"name": "adafactor"},
    )
    specs = build(settings.model).abstract_params()
    optimizer = make_optimizer(settings.optimizer, specs)
    layout = make_layout(specs, optimizer, make_mesh(settings.mesh, jax.devices()[:8]), settings.mesh.zero).state
    by_path = {path_name(path): s.spec for path, s in jax.tree_util.tree_leaves_with_path(layout.opt_state)}
    found = {
        (field, name): next(at for path, at in by_path.items() if f"/{field}/" in path and path.endswith(name))
        for field in ("v_row", "v_col")
        for name in ("moe/w_up", "moe/w_down", "attention/w_q", "embedding/table")
    }
    # Rows are the shorter side, which is the model's width here; columns the other.
    rows = {"moe/w_up": P(None, "expert", "fsdp"), "moe/w_down": P(None, "expert", "fsdp")}
    rows |= {"attention/w_q": P(None, "fsdp"), "embedding/table": P("fsdp")}
    columns = {"moe/w_up": P(None, "expert", "tensor"), "moe/w_down": P(None, "expert", "tensor")}
    columns |= {"attention/w_q": P(None, "tensor", "fsdp"), "embedding/table": P("tensor")}
    assert found == {("v_row", n): at for n, at in rows.items()} | {("v_col", n): at for n, at in columns.items()}

    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda s: rng.standard_normal(s.shape).astype(np.float32), specs, is_leaf=is_spec)
    alone, _ = jax.jit(lambda g: optimizer.update(g, optimizer.init(g), g))(grads)
    shardings = {"in_shardings": (layout.params,), "out_shardings": (layout.params, layout.opt_state)}
    split, _ = jax.jit(lambda g: optimizer.update(g, optimizer.init(g), g), **shardings)(grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), split, alone)


@pytest.mark.parametrize("name", ["lion", "adafactor"])
def test_decay_and_peak_are_those_of_every_rule(name):
    still = OptimizerConfig(name=name, learning_rate=0.5, weight_decay=0.0)
    decayed = OptimizerConfig(name=name, learning_rate=0.5, weight_decay=0.1)
    (a, _, params), (b, _, _) = updates_of(still), updates_of(decayed)
    assert not np.any(a["selection"]) and all(np.any(update) for key, update in a.items() if key != "selection")
    for key, s in SPECS.items():
        expected = 0.05 * params[key] if s.role in ("matrix", "router", "head") else np.zeros_like(params[key])
        np.testing.assert_allclose(b[key] - a[key], expected, atol=2e-6)
