"""Losses: cross entropy through the head in chunks, and the auxiliary losses of the routers.

Everything that is summed over tokens is summed in one additive pytree, `Sums`, and divided once, when all is
summed. Sums of micro-batches, devices and evaluation batches therefore add up to those of the whole.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.config import ModelConfig
from zoo.data.loader import Batch
from zoo.layers.moe.balance import balance_loss, z_loss
from zoo.layers.moe.router import RoutingStats
from zoo.models.decoder import Decoder

# Floats that the logits of one chunk may take: small enough for a CPU's cache, large enough for its matrix units.
CHUNK_SIZE = 2**21


class Sums(NamedTuple):
    """Sums over the tokens of any number of batches.

    Attributes:
        loss: [] cross entropy, nats.
        weight: [] labels.
        routing: the model's routing statistics, [stage][block].
    """

    loss: Array
    weight: Array
    routing: Any


def sums(
    model: Decoder, params: Any, batch: Batch, *, deterministic: bool = True, rngs: dict[str, Array] | None = None
) -> Sums:
    """Loss, weight and routing statistics of a batch, differentiable in `params`."""
    hidden, routing, _ = _apply(model, params, batch, deterministic, rngs)
    loss = cross_entropy(hidden, model.head_weights(params), batch.labels)
    return Sums(loss, label_count(batch.labels).sum(), routing)


def row_losses(model: Decoder, params: Any, batch: Batch) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
    """Cross entropy in nats and number of labels of every row, for evaluation."""
    hidden, _, _ = _apply(model, params, batch, True, None)
    return row_cross_entropy(hidden, model.head_weights(params), batch.labels), label_count(batch.labels)


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
    hidden: Float[Array, "B T D"], head: Float[Array, "D V"], labels: Int[Array, "B T"]
) -> Float[Array, "B"]:
    """The sum over each row of -log softmax(hidden head)[label], in nats; labels of -1 count nothing.

    The logits are made in chunks of positions and never stored whole.

    Args:
        hidden: after the final norm; its dtype is that of the head's product, the softmax is float32.
        head: output weights.
    """
    head = head.astype(hidden.dtype)

    def step(losses: Array, chunk: Any) -> tuple[Array, None]:
        return losses + _chunk_loss(chunk[0], head, chunk[1])[0], None

    chunks = _chunked(hidden, labels, head.shape[1])
    return jax.lax.scan(step, jnp.zeros(len(hidden), jnp.float32), chunks)[0]


@jax.custom_vjp
def cross_entropy(
    hidden: Float[Array, "B T D"], head: Float[Array, "D V"], labels: Int[Array, "B T"]
) -> Float[Array, ""]:
    """The sum of `row_cross_entropy` over the rows.

    Where a gradient is asked for, each chunk makes it together with its loss, so that the head's product is
    not computed a second time in the backward pass.
    """
    return row_cross_entropy(hidden, head, labels).sum()


def _cross_entropy_fwd(hidden: Array, head: Array, labels: Array) -> tuple[Array, tuple[Array, Array]]:
    head_cast = head.astype(hidden.dtype)

    def step(carry: Any, chunk: Any) -> Any:
        loss, head_grad = carry
        x, y = chunk
        losses, softmax = _chunk_loss(x, head_cast, y)
        logit_grad = jnp.where(y[..., None] >= 0, softmax - (y[..., None] == jnp.arange(head.shape[1])), 0)
        logit_grad = logit_grad.astype(hidden.dtype)
        head_grad += jnp.einsum("BTD,BTV->DV", x, logit_grad, preferred_element_type=jnp.float32)
        return (loss + losses.sum(), head_grad), jnp.einsum("BTV,DV->BTD", logit_grad, head_cast)

    zero = (jnp.zeros((), jnp.float32), jnp.zeros(head.shape, jnp.float32))
    (loss, head_grad), x_grad = jax.lax.scan(step, zero, _chunked(hidden, labels, head.shape[1]))
    x_grad = jnp.moveaxis(x_grad, 0, 1).reshape(len(hidden), -1, hidden.shape[-1])[:, : hidden.shape[1]]
    return loss, (x_grad, head_grad.astype(head.dtype))


def _cross_entropy_bwd(grads: tuple[Array, Array], scale: Array) -> tuple[Array, Array, None]:
    x_grad, head_grad = grads
    return x_grad * scale.astype(x_grad.dtype), head_grad * scale.astype(head_grad.dtype), None


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def _chunk_loss(hidden: Array, head: Array, labels: Array) -> tuple[Array, Array]:
    """The loss of each row of a chunk, and its softmax."""
    logits = jnp.einsum("BTD,DV->BTV", hidden, head, preferred_element_type=jnp.float32)
    log_probs = jax.nn.log_softmax(logits)
    label_log_probs = jnp.take_along_axis(log_probs, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(labels >= 0, label_log_probs, 0).sum(axis=1), jnp.exp(log_probs)


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
    """Unweighted balance loss and router z-loss, each the mean over the MoE layers; empty without a mixture.

    Args:
        routing: summed statistics, [stage][block], leaves stacked over the repeats.
    """
    layers = moe_layers(routing)
    if layers is None:
        return {}
    return {"balance": balance_loss(layers, config.moe.k).mean(), "z": z_loss(layers).mean()}


def auxiliary_loss(routing: Any, config: ModelConfig) -> Float[Array, ""]:
    """What the routers' statistics add to the loss, weighted as the config says."""
    losses = auxiliary_losses(routing, config)
    if not losses:
        return jnp.zeros(())
    return config.moe.balance_weight * losses["balance"] + config.moe.z_weight * losses["z"]


def moe_layers(routing: Any) -> RoutingStats | None:
    """The statistics of all MoE layers with one leading axis [layers], in the order of the network."""
    stages = [[block for block in stage if block is not None] for stage in routing]
    # Repeats first, then blocks: the order in which a token meets the layers.
    stacked = [jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(-1, *x[0].shape[1:]), *s) for s in stages if s]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *stacked) if stacked else None


def total_loss(total: Sums, config: ModelConfig) -> Float[Array, ""]:
    """Mean cross entropy plus the auxiliary losses of the summed statistics: what training minimizes."""
    return total.loss / jnp.maximum(total.weight, 1) + auxiliary_loss(total.routing, config)
