"""Losses: cross entropy through the head in chunks, and the auxiliary losses of the routers.

Everything that is summed over tokens is summed in one additive pytree, `Sums`, and divided once, when all is
summed. Sums of micro-batches, devices and evaluation batches therefore add up to those of the whole.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.config import ModelConfig
from zoo.data.loader import Batch
from zoo.kernels.linear import turned, wide_product
from zoo.layers.embedding import HeadWeights, scores_of
from zoo.layers.moe.balance import loss_weights, losses
from zoo.layers.moe.router import RoutingStats
from zoo.models.decoder import Decoder

# Floats that the logits of one chunk may take: small enough for a CPU's cache, large enough for its matrix units.
CHUNK_SIZE = 2**21


class Sums(NamedTuple):
    """Sums over the tokens of any number of batches.

    Attributes:
        objective: [] cross entropy and weighted z-loss of the logits, nats: what carries their gradient.
        loss: [] cross entropy alone, nats. No gradient.
        z: [] squared logsumexp of the logits. No gradient.
        weight: [] labels.
        routing: the model's routing statistics, [stage][block].
    """

    objective: Array
    loss: Array
    z: Array
    weight: Array
    routing: Any


def sums(
    model: Decoder, params: Any, batch: Batch, *, deterministic: bool = True, rngs: dict[str, Array] | None = None
) -> Sums:
    """Loss, weight and routing statistics of a batch, differentiable in `params`."""
    hidden, routing, _ = _apply(model, params, batch, deterministic, rngs)
    objective, loss, z = cross_entropy(hidden, model.head_weights(params), batch.labels, model.config)
    return Sums(objective, loss, z, label_count(batch.labels).sum(), routing)


def row_losses(model: Decoder, params: Any, batch: Batch) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
    """Cross entropy in nats and number of labels of every row, for evaluation."""
    hidden, _, _ = _apply(model, params, batch, True, None)
    losses = row_cross_entropy(hidden, model.head_weights(params), batch.labels, model.config)
    return losses, label_count(batch.labels)


def _apply(model: Decoder, params: Any, batch: Batch, deterministic: bool, rngs: Any) -> Any:
    return model.apply(
        {"params": params},
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        deterministic=deterministic,
        rngs=rngs,
        method="hidden",
    )


def label_count(labels: Int[Array, "B T"]) -> Float[Array, "B"]:
    """Labels in each row; -1 is none."""
    return jnp.sum(labels >= 0, axis=1, dtype=jnp.float32)


# ------------------------------------------------------------------------- head and cross entropy


def row_cross_entropy(
    hidden: Float[Array, "B T D"], head: HeadWeights, labels: Int[Array, "B T"], config: ModelConfig
) -> Float[Array, "B"]:
    """The sum over each row of -log softmax(logits)[label], in nats; labels of -1 count nothing.

    The logits are made in chunks of positions and never stored whole.

    Args:
        hidden: what the head reads; its dtype is that of the head's product, the softmax is float32.
        head: output weights.
    """
    w = _head_matrix(head, hidden)

    def step(losses: Array, chunk: Any) -> tuple[Array, None]:
        return losses + _losses(_product(chunk[0], w), head.bias, chunk[1], config)[0], None

    chunks = _chunked(hidden, labels, w.shape[1])
    return jax.lax.scan(step, jnp.zeros(len(hidden), jnp.float32), chunks)[0]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(
    hidden: Float[Array, "B T D"], head: HeadWeights, labels: Int[Array, "B T"], config: ModelConfig
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Sums over all labels: loss + logit_z_weight * z, and loss and z alone; only the first has a gradient.

    The loss is `row_cross_entropy`, z the squared logsumexp of the logits. Where a gradient is asked for, each chunk
    makes it together with its loss, so that the head's product is not computed a second time in the backward pass.

    Source of the z-loss: PaLM, arXiv 2204.02311, section 5.
    """
    w = _head_matrix(head, hidden)

    def step(total: Array, chunk: Any) -> tuple[Array, None]:
        return total + _totals(_product(chunk[0], w), head.bias, chunk[1], config), None

    total, _ = jax.lax.scan(step, jnp.zeros(3, jnp.float32), _chunked(hidden, labels, w.shape[1]))
    return tuple(total)


def _cross_entropy_fwd(hidden: Array, head: HeadWeights, labels: Array, config: ModelConfig) -> tuple[Any, Any]:
    w = _head_matrix(head, hidden)
    w_turned = turned(w)

    def step(carry: Any, chunk: Any) -> Any:
        total, sums = carry
        x, y = chunk
        new, pull = jax.vjp(lambda product, bias: _totals(product, bias, y, config), _product(x, w), head.bias)
        d_product, d_bias = pull(jnp.array([1.0, 0.0, 0.0]))
        d_product = d_product.astype(hidden.dtype)
        d_w = wide_product(turned(_flat(x)), _flat(d_product))
        sums = jax.tree.map(lambda s, d: s + d.astype(jnp.float32), sums, HeadWeights(d_w, d_bias))
        return (total + new, sums), _product(d_product, w_turned).astype(hidden.dtype)

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), head)
    (total, d_head), d_hidden = jax.lax.scan(step, (jnp.zeros(3), zeros), _chunked(hidden, labels, w.shape[1]))
    d_hidden = jnp.moveaxis(d_hidden, 0, 1).reshape(len(hidden), -1, hidden.shape[-1])[:, : hidden.shape[1]]
    return tuple(total), (d_hidden, jax.tree.map(lambda d, p: d.astype(p.dtype), d_head, head))


def _cross_entropy_bwd(config: ModelConfig, grads: tuple[Array, HeadWeights], scales: Any) -> tuple[Any, Any, None]:
    del config
    return *jax.tree.map(lambda d: d * scales[0].astype(d.dtype), grads), None


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def _head_matrix(head: HeadWeights, hidden: Array) -> Array:
    """The head's weights in hidden's dtype."""
    w = head.w.astype(hidden.dtype)
    return turned(w.T)  # one that is tied to the embedding lies by columns


def _flat(x: Float[Array, "B T D"]) -> Float[Array, "N D"]:
    return x.reshape(-1, x.shape[-1])


def _product(x: Float[Array, "B T D"], w: Float[Array, "D V"]) -> Float[Array, "B T V"]:
    return wide_product(_flat(x), w).reshape(*x.shape[:-1], -1)


def _losses(product: Array, bias: Array | None, labels: Array, config: ModelConfig) -> tuple[Array, Array]:
    """Cross entropy and squared logsumexp of a chunk, each summed over the positions of a row."""
    scores = scores_of(product, bias, config)
    total = jax.nn.logsumexp(scores, axis=-1)
    label_scores = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    counted = labels >= 0
    return jnp.where(counted, total - label_scores, 0).sum(1), jnp.where(counted, jnp.square(total), 0).sum(1)


def _totals(product: Array, bias: Array | None, labels: Array, config: ModelConfig) -> Float[Array, "3"]:
    loss, z = (rows.sum() for rows in _losses(product, bias, labels, config))
    return jnp.stack([loss + config.logit_z_weight * z, loss, z])


def _chunked(hidden: Array, labels: Array, vocab_size: int) -> tuple[Array, Array]:
    """Chunks of positions, [n, B, rows, ...], the last one filled up with labels of -1."""
    B, T = labels.shape
    rows = max(1, min(T, CHUNK_SIZE // (B * vocab_size)))
    rest = -T % rows

    def split(x: Array, fill: int) -> Array:
        x = jnp.pad(x, [(0, 0), (0, rest)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return jnp.moveaxis(x.reshape(B, -1, rows, *x.shape[2:]), 1, 0)

    return split(hidden, 0), split(labels, -1)


# ------------------------------------------------------------------------------- auxiliary losses


def auxiliary_losses(routing: Any, config: ModelConfig) -> dict[str, Float[Array, ""]]:
    """Unweighted balance loss, router z-loss and others that have a weight, means over the MoE layers; or nothing.

    Args:
        routing: summed statistics, [stage][block], leaves stacked over the repeats.
    """
    layers = moe_layers(routing)
    if layers is None:
        return {}
    return {name: loss.mean() for name, loss in losses(layers, config.moe).items()}


def auxiliary_loss(routing: Any, config: ModelConfig) -> Float[Array, ""]:
    """What the routers' statistics add to the loss, weighted as the config says."""
    weights = {} if config.moe is None else loss_weights(config.moe)
    terms = [weights[name] * loss for name, loss in auxiliary_losses(routing, config).items()]
    return sum(terms, jnp.zeros(()))


def moe_layers(routing: Any) -> RoutingStats | None:
    """The statistics of all MoE layers with one leading axis [layers], in the order of the network."""
    stages = [[block for block in stage if block is not None] for stage in routing]
    # Repeats first, then blocks: the order in which a token meets the layers.
    stacked = [jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(-1, *x[0].shape[1:]), *s) for s in stages if s]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *stacked) if stacked else None


def total_loss(total: Sums, config: ModelConfig) -> Float[Array, ""]:
    """Mean cross entropy and z-loss plus the auxiliary losses of the summed statistics: what training minimizes."""
    return total.objective / jnp.maximum(total.weight, 1) + auxiliary_loss(total.routing, config)
