"""Who may see whom, as small hashable descriptions."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclass(frozen=True)
class Causal:
    """A query sees keys at its own and earlier positions.

    Attributes:
        window: only the last `window` positions, the query's own included (arXiv 2004.05150); None for all.
    """

    window: int | None = None

    def allows(self, query: Int[Array, "*#N"], key: Int[Array, "*#N"]) -> Bool[Array, "*#N"]:
        """Whether a query at position `query` sees a key at position `key`; shapes broadcast."""
        causal = key <= query
        return causal if self.window is None else causal & (query - key < self.window)


@dataclass(frozen=True)
class Full:
    """A query sees every key (of its segment), as in attention to another sequence."""

    def allows(self, query: Int[Array, "*#N"], key: Int[Array, "*#N"]) -> Bool[Array, "*#N"]:
        """True everywhere; shapes broadcast."""
        return jnp.ones(jnp.broadcast_shapes(query.shape, key.shape), bool)


Mask = Causal | Full
