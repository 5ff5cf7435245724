"""Cross entropy in chunks against NumPy float64, and sums that add."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.laws.architectures import ARCHITECTURES
from zoo import objectives
from zoo.config import ModelConfig
from zoo.laws.case import make_case
from zoo.layers.embedding import HeadWeights


def reference(hidden, head, labels):
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    log_probs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_probs -= logits.max(-1, keepdims=True)
    taken = np.take_along_axis(log_probs, np.maximum(labels, 0)[..., None], -1)[..., 0]
    return -np.where(labels >= 0, taken, 0).sum(-1)


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(3, 11, 8)), rng.normal(size=(8, 13))
    labels = rng.integers(-1, 13, (3, 11))
    labels[2] = -1  # a row without labels
    return jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32), jnp.asarray(labels)


CONFIG = ModelConfig(vocab_size=13, d_model=8, n_heads=1)


def row_cross_entropy(hidden, head, labels):
    return objectives.row_cross_entropy(hidden, HeadWeights(head, None), labels, CONFIG)


def cross_entropy(hidden, head, labels):
    return objectives.cross_entropy(hidden, HeadWeights(head, None), labels, CONFIG)[0]


@pytest.mark.parametrize("chunk", [1, 3 * 13 * 4, 10**6])  # one position, four (11 is not a multiple), all
def test_cross_entropy_and_its_gradient_do_not_depend_on_chunks(inputs, chunk, monkeypatch):
    monkeypatch.setattr(objectives, "CHUNK_SIZE", chunk)
    hidden, head, labels = inputs
    np.testing.assert_allclose(row_cross_entropy(*inputs), reference(*inputs), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cross_entropy(*inputs), reference(*inputs).sum(), rtol=1e-5)

    def plain(hidden, head):
        return -jnp.where(labels >= 0, jax.nn.log_softmax(hidden @ head)[_index(labels)], 0).sum()

    expected = jax.grad(lambda *x: 0.3 * plain(*x), argnums=(0, 1))(hidden, head)
    actual = jax.grad(lambda *x: 0.3 * cross_entropy(*x, labels), argnums=(0, 1))(hidden, head)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("chunk", [3 * 16 * 4, 10**6])
def test_bias_softcap_padded_vocabulary_and_z_loss(inputs, chunk, monkeypatch):
    """Values, gradients of every operand, and no gradient for padded rows; labels never fall on them."""
    monkeypatch.setattr(objectives, "CHUNK_SIZE", chunk)
    config = dataclasses.replace(CONFIG, vocab_multiple=16, logit_softcap=2.0, logit_z_weight=0.1, head_bias=True)
    hidden, _, labels = inputs
    rng = np.random.default_rng(1)
    head = HeadWeights(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 16), 16)))

    def plain(hidden, head):
        scores = 2 * jnp.tanh((hidden @ head.w + head.bias) / 2)[..., :13]
        z = jnp.square(jax.nn.logsumexp(scores, axis=-1))
        loss = -jax.nn.log_softmax(scores)[_index(labels)]
        loss, z = (jnp.where(labels >= 0, x, 0).sum() for x in (loss, z))
        return loss + 0.1 * z, loss, z

    found = objectives.cross_entropy(hidden, head, labels, config)
    np.testing.assert_allclose(found, plain(hidden, head), rtol=1e-5)
    rows = objectives.row_cross_entropy(hidden, head, labels, config)
    np.testing.assert_allclose(rows.sum(), found[1], rtol=1e-5)
    first = lambda f: jax.grad(lambda *x: 0.3 * f(*x)[0], argnums=(0, 1))(hidden, head)  # noqa: E731
    actual, expected = first(lambda *x: objectives.cross_entropy(*x, labels, config)), first(plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), actual, expected)
    assert not np.any(actual[1].w[:, 13:]) and not np.any(actual[1].bias[13:])


def _index(labels):
    rows, columns = np.indices(labels.shape)
    return rows, columns, jnp.maximum(labels, 0)


def test_logits_are_never_whole(inputs, monkeypatch):
    monkeypatch.setattr(objectives, "CHUNK_SIZE", 3 * 13 * 2)
    program = str(jax.make_jaxpr(jax.grad(cross_entropy, argnums=(0, 1)))(*inputs))
    assert "f32[3,2,13]" in program
    assert "f32[3,11,13]" not in program


def test_sums_of_parts_add_up_to_the_whole():
    case = make_case(zoo.build(ARCHITECTURES["sparse"]), None, seed=0)
    batch = case.batch([[9, 5], [12], [3, 20], [2]])
    parts = [jax.tree.map(lambda x, i=i: x[i : i + 2], batch) for i in (0, 2)]
    whole = case.sums(batch)
    added = jax.tree.map(jnp.add, *map(case.sums, parts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), whole, added)
    mean_of_means = np.mean([objectives.total_loss(case.sums(part), case.model.config) for part in parts])
    total = objectives.total_loss(added, case.model.config)
    np.testing.assert_allclose(total, objectives.total_loss(whole, case.model.config), rtol=1e-5)
    assert abs(mean_of_means - total) > 1e-4  # the mistake that sums avoid


def test_row_losses_add_up_to_the_sums():
    case = make_case(zoo.build(ARCHITECTURES["none"]), None, seed=0)
    batch = case.batch([[9, 5], [12], []])
    loss, weight = jax.jit(lambda b: objectives.row_losses(case.model, case.params, b))(batch)
    np.testing.assert_array_equal(weight, [12, 11, 0])
    np.testing.assert_allclose(loss.sum(), case.sums(batch).loss, rtol=1e-5)


def test_layers_come_in_the_order_of_the_network():
    E = 2

    def stats(*values):
        return objectives.RoutingStats(
            *(jnp.array(values)[:, None] * jnp.ones(E) for _ in objectives.RoutingStats._fields)
        )

    routing = ((None,), (stats(1.0, 3.0), None, stats(2.0, 4.0)))
    np.testing.assert_array_equal(objectives.moe_layers(routing).counts[:, 0], [1, 2, 3, 4])
    assert objectives.moe_layers(((None,),)) is None
