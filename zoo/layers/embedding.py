"""Token embedding and output head."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.config import ModelConfig
from zoo.layers.initializers import table_init
from zoo.layers.logical import Constrain, declare, unconstrained


class Embedding(nn.Module):
    """The table of token vectors.

    Attributes:
        config: sizes, initializer and dtype.
        constrain: pins arrays to the mesh.
    """

    config: ModelConfig
    constrain: Constrain = unconstrained

    def setup(self):
        config = self.config
        shape, axes = (config.padded_vocab_size, config.d_model), ("vocab", "embed")
        self.table = declare(self, "table", table_init(config), shape, axes, "embedding", config.param_dtype)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The vector of each token; of a token outside the vocabulary, NaN rather than another token's."""
        # Rows are taken from whole vectors: out of vectors split over a mesh, XLA would copy the table anyway.
        table = self.constrain(self.table, ("vocab", "embed"))
        known = jnp.where(tokens < 0, self.config.vocab_size, tokens)  # a negative index would count from the end
        return jnp.take(table, known, axis=0, mode="fill", fill_value=jnp.nan)


class Head(nn.Module):
    """The output weights of a model that does not reuse its embedding table; attributes as in Embedding."""

    config: ModelConfig

    def setup(self):
        config = self.config
        shape, axes = (config.d_model, config.padded_vocab_size), ("embed", "vocab")
        self.w = declare(self, "w", table_init(config), shape, axes, "head", config.param_dtype, axes[:1], axes[1:])
