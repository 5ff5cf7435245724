"""From logits to the next token: temperature, top-k, top-p, and a random key per row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def keep_top_k(logits: Float[Array, "B V"], top_k: int | Int[Array, ""]) -> Float[Array, "B V"]:
    """The `top_k` largest logits of each row, the others -inf; of equal ones the lower id wins."""
    order = _descending(logits)
    kept = jnp.broadcast_to(jnp.arange(logits.shape[-1]) < top_k, logits.shape)
    return jnp.where(_in_vocabulary_order(kept, order), logits, -jnp.inf)


def keep_top_p(logits: Float[Array, "B V"], top_p: float | Float[Array, ""]) -> Float[Array, "B V"]:
    """The smallest set of likeliest tokens of each row that carries at least the mass `top_p`, the others -inf.

    At least one token stays (nucleus sampling, arXiv 1904.09751, section 3.1); of equal ones the lower id wins.
    """
    order = _descending(logits)
    mass = jnp.cumsum(jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1)), axis=-1)
    # A token stays where those before it do not reach the mass yet; nothing stands before the first.
    before = jnp.pad(mass[:, :-1], ((0, 0), (1, 0)), constant_values=-1.0)
    # In float32 the mass reaches 1 before the last token, but a mass of 1 means all of them.
    kept = (before < top_p) | (jnp.asarray(top_p) >= 1)
    return jnp.where(_in_vocabulary_order(kept, order), logits, -jnp.inf)


def sample(
    logits: Float[Array, "B V"],
    keys: Key[Array, "B"],
    temperature: float | Float[Array, ""],
    top_k: int | Int[Array, ""] | None = None,
    top_p: float | Float[Array, ""] | None = None,
) -> Int[Array, "B"]:
    """One token per row from softmax(logits / temperature), cut to the top k and then to the mass p of those.

    Args:
        logits: of the next token; -inf where a token may not be drawn.
        keys: one per row, so that no row depends on another.
        temperature: 0 takes the likeliest token, the lowest id among equals.
        top_k: None for all.
        top_p: None for all.
    """
    tiny = jnp.finfo(jnp.float32).tiny
    # Relative to the largest logit, the likeliest token stays at 0 however low the temperature.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    cut = shifted / jnp.maximum(temperature, tiny)
    if top_k is not None:
        cut = keep_top_k(cut, top_k)
    if top_p is not None:
        cut = keep_top_p(cut, top_p)
    drawn = jax.vmap(jax.random.categorical)(keys, cut)
    return jnp.where(temperature < tiny, jnp.argmax(logits, axis=-1), drawn)


def row_keys(keys: Key[Array, "B"], n_generated: int | Int[Array, ""]) -> Key[Array, "B"]:
    """The key of each row for its next token, after `n_generated` of them."""
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, n_generated)


def _descending(logits: Float[Array, "B V"]) -> Int[Array, "B V"]:
    return jnp.argsort(logits, axis=-1, stable=True, descending=True)


def _in_vocabulary_order(ranked: Array, order: Int[Array, "B V"]) -> Array:
    """Values by rank as values by token."""
    return jnp.put_along_axis(jnp.zeros_like(ranked), order, ranked, axis=-1, inplace=False)
