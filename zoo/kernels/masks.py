"""Who may see whom, as small hashable descriptions."""

from dataclasses import dataclass

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
