"""Token embedding and output head."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.config import Dtype
from zoo.layers.logical import Constrain, declare, unconstrained


class Embedding(nn.Module):
    """The table of token vectors.

    Attributes:
        vocab_size: V.
        d_model: D.
        init_std: of the normal initializer.
        param_dtype: of the table.
        constrain: pins arrays to the mesh.
    """

    vocab_size: int
    d_model: int
    init_std: float
    param_dtype: Dtype
    constrain: Constrain = unconstrained

    def setup(self):
        shape, axes = (self.vocab_size, self.d_model), ("vocab", "embed")
        init = nn.initializers.normal(self.init_std)
        self.table = declare(self, "table", init, shape, axes, "embedding", self.param_dtype)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The vector of each token; of a token outside the vocabulary, NaN rather than another token's."""
        # Rows are taken from whole vectors: out of vectors split over a mesh, XLA would copy the table anyway.
        table = self.constrain(self.table, ("vocab", "embed"))
        known = jnp.where(tokens < 0, self.vocab_size, tokens)  # a negative index would count from the end
        return jnp.take(table, known, axis=0, mode="fill", fill_value=jnp.nan)


class Head(nn.Module):
    """The output weights of a model that does not reuse its embedding table; attributes as in Embedding."""

    vocab_size: int
    d_model: int
    init_std: float
    param_dtype: Dtype

    def setup(self):
        shape, axes = (self.d_model, self.vocab_size), ("embed", "vocab")
        init = nn.initializers.normal(self.init_std)
        self.w = declare(self, "w", init, shape, axes, "head", self.param_dtype, axes[:1], axes[1:])
