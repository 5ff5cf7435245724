"""Token embedding, positions that are added to it, and the output head."""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.config import ModelConfig
from zoo.layers.initializers import table_init
from zoo.layers.logical import Constrain, declare, unconstrained
from zoo.layers.norm import build_norm
from zoo.layers.position import learned, sinusoidal


class Embedding(nn.Module):
    """The table of token vectors, and what comes before the first block: scale, positions, norm, dropout.

    Attributes:
        config: sizes, positions, initializer and dtypes.
        constrain: pins arrays to the mesh.
    """

    config: ModelConfig
    constrain: Constrain = unconstrained

    def setup(self):
        config = self.config
        shape, axes = (config.padded_vocab_size, config.d_model), ("vocab", "embed")
        self.table = declare(self, "table", table_init(config), shape, axes, "embedding", config.param_dtype)
        if config.position == "learned":
            rows = (config.position_rows or config.context_length) + config.position_offset
            shape, axes = (rows, config.d_model), (None, "embed")
            self.rows = declare(self, "positions", table_init(config), shape, axes, "embedding", config.param_dtype)
        if config.embedding_norm:
            self.norm = build_norm(config)
        self.drop = nn.Dropout(config.dropout)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], deterministic: bool = True
    ) -> Float[Array, "B T D"]:
        """The input of the first block, in the compute dtype; NaN for a token or a learned position that there is not.

        The scale sqrt(D) is rounded to the compute dtype, as in Gemma's published code (arXiv 2403.08295).
        """
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        x = self._vectors(tokens).astype(dtype)
        if config.embedding_scale:
            x *= jnp.asarray(config.d_model**0.5, dtype)
        if config.position == "learned":
            rows = self.constrain(self.rows, (None, "embed"))  # whole vectors, as of the table
            x += learned(rows, positions, config.position_offset).astype(dtype)
        elif config.position == "sinusoidal":
            x += sinusoidal(positions, config.d_model).astype(dtype)
        x = self.norm(x) if config.embedding_norm else x
        return self.constrain(self.drop(x, deterministic=deterministic), ("batch", "length", "embed"))

    def _vectors(self, tokens: Array) -> Array:
        # Rows are taken from whole vectors: out of vectors split over a mesh, XLA would copy the table anyway.
        table = self.constrain(self.table, ("vocab", "embed"))
        size = self.config.vocab_size
        known = jnp.where((tokens < 0) | (tokens >= size), len(table), tokens)  # a negative index counts from the end
        return jnp.take(table, known, axis=0, mode="fill", fill_value=jnp.nan)


class HeadWeights(NamedTuple):
    """What turns hidden states into logits; V' is the padded vocabulary.

    Attributes:
        w: [D, V'].
        bias: [V'], or None.
    """

    w: Array
    bias: Array | None


class Head(nn.Module):
    """The output weights of a model that does not reuse its embedding table, and the bias of one that has it.

    Attributes:
        config: sizes, initializer and dtype.
    """

    config: ModelConfig

    def setup(self):
        config = self.config
        shape, axes = (config.d_model, config.padded_vocab_size), ("embed", "vocab")
        if not config.tie_embeddings:
            init = table_init(config)
            self.w = declare(self, "w", init, shape, axes, "head", config.param_dtype, axes[:1], axes[1:])
        if config.head_bias:
            self.bias = declare(self, "bias", nn.initializers.zeros, shape[1:], axes[1:], "bias", config.param_dtype)

    def __call__(self) -> None:
        """Nothing: the head is read as weights, so that a loss can make its logits in chunks."""


def logits(hidden: Float[Array, "*N D"], head: HeadWeights, config: ModelConfig) -> Float[Array, "*N V"]:
    """Scores of the tokens of the vocabulary, in float32: `scores_of` the product in hidden's dtype."""
    product = jnp.einsum("...D,DV->...V", hidden, head.w.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return scores_of(product, head.bias, config)[..., : config.vocab_size]


def scores_of(
    product: Float[Array, "*N V"], bias: Float[Array, "V"] | None, config: ModelConfig
) -> Float[Array, "*N V"]:
    """The head's product over the padded vocabulary with bias and softcap; -inf for padded tokens.

    Source of the softcap c tanh(logit / c): Gemma 2, arXiv 2408.00118, section 2.
    """
    scores = product if bias is None else product + bias.astype(product.dtype)
    if config.logit_softcap is not None:
        scores = config.logit_softcap * jnp.tanh(scores / config.logit_softcap)
    if config.padded_vocab_size == config.vocab_size:
        return scores
    return jnp.where(jnp.arange(config.padded_vocab_size) < config.vocab_size, scores, -jnp.inf)
