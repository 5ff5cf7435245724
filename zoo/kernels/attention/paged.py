"""Attention of one new token per row to a cache whose pages lie anywhere: what decoding does (arXiv 2309.06180).

Every backend has the signature of `gathered`, and says in its `refuses` what it cannot do.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.kernels.attention import dense, paged_gpu, paged_tpu
from zoo.kernels.attention.problem import Operands, PagedOperands, Settings
from zoo.kernels.block_map import Places
from zoo.kernels.masks import Causal
from zoo.kernels.target import Target, target


class PagedBackend(NamedTuple):
    """A way to compute it.

    Attributes:
        decode: (operands, settings) -> output [B, H, d] in the dtype of v, log sums [B, H] float32.
        refuses: (operands, settings, target) -> why it cannot do that, or None if it can.
    """

    decode: Callable
    refuses: Callable[[PagedOperands, Settings, Target], str | None]


def decode_attention(
    q: Float[Array, "B H h"],
    k_pages: Float[Array, "P page K h"],
    v_pages: Float[Array, "P page K d"],
    page_table: Int[Array, "B n"],
    lengths: Int[Array, "B"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    alibi_slopes: Float[Array, "H"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Float[Array, "B H d"] | tuple[Float[Array, "B H d"], Float[Array, "B H"]]:
    """Attention of the last token of every row, at position lengths - 1, to all of the row's tokens.

    Keys and values of that token are in the cache already. The same numbers as `attention` with one query and
    Causal(window), whose arguments these are; a row of length 0 gives 0 and the log sum -inf. It has no gradient.

    Args:
        page_table: pages of each row in order; entries behind its length are not read, but are pages that exist.
        window: only the last `window` tokens; None for all.
        return_lse: return (out, lse) with the log of each sum of exponentials, sinks included.
        backend: a name in BACKENDS; "auto" takes what the device does best.

    Raises:
        ValueError: shapes do not fit, or the backend cannot do it.
    """
    _check(q, k_pages, v_pages, page_table, lengths)
    slopes = None if alibi_slopes is None else alibi_slopes.astype(jnp.float32)
    operands = PagedOperands(q, k_pages, v_pages, page_table, lengths, slopes)
    settings = Settings(q.shape[-1] ** -0.5 if scale is None else scale, Causal(window), softcap=softcap)
    out, lse = BACKENDS[_choose(backend, operands, settings)].decode(operands, settings)
    if sinks is not None:
        share = jax.nn.sigmoid(lse - sinks)
        out = (out * share[..., None]).astype(out.dtype)
        lse = jnp.where(lse > -jnp.inf, jnp.logaddexp(lse, sinks), lse)
    return (out, lse) if return_lse else out


def gathered(operands: PagedOperands, settings: Settings) -> tuple[Float[Array, "B H d"], Float[Array, "B H"]]:
    """The plain form: every row's pages side by side, and `dense.forward`."""
    slots = operands.page_table.shape[1] * operands.k_pages.shape[1]
    lengths = operands.lengths[:, None]
    real = jnp.arange(slots) < lengths

    def row_of(pages: Array) -> Array:
        side_by_side = pages[operands.page_table].reshape(len(real), slots, *pages.shape[2:])
        return jnp.where(real[..., None, None], side_by_side, 0)

    at = jnp.broadcast_to(jnp.arange(slots), real.shape)
    places = Places(lengths - 1, at, jnp.ones_like(lengths), real.astype(jnp.int32))
    slopes = operands.slopes
    slopes = None if slopes is None else jnp.broadcast_to(slopes, (len(real), len(slopes)))
    k, v = row_of(operands.k_pages), row_of(operands.v_pages)
    out, lse = dense.forward(Operands(operands.q[:, None], k, v, places, slopes), settings)
    return out[:, 0], lse[..., 0]


def _anything(operands: PagedOperands, settings: Settings, device: Target) -> None:
    return None


BACKENDS = {
    "gathered": PagedBackend(gathered, _anything),
    "paged_gpu": PagedBackend(paged_gpu.decode, paged_gpu.refuses),
    "paged_tpu": PagedBackend(paged_tpu.decode, paged_tpu.refuses),
}
# What `auto` asks, in this order; "gathered" comes last everywhere.
ORDER: dict[str, tuple[str, ...]] = {"gpu": ("paged_gpu",), "tpu": ("paged_tpu",)}


def _choose(name: str, operands: PagedOperands, settings: Settings) -> str:
    """The backend that `name` stands for."""
    device = target()
    if name == "auto":
        able = (n for n in ORDER.get(device.platform, ()) if BACKENDS[n].refuses(operands, settings, device) is None)
        return next(able, "gathered")
    if name not in BACKENDS:
        raise ValueError(f"decode_attention: there is no backend {name!r}, choose auto or one of {', '.join(BACKENDS)}")
    reason = BACKENDS[name].refuses(operands, settings, device)
    if reason:
        raise ValueError(f"decode_attention: backend {name!r} cannot run: {reason}; backend='auto' steps aside")
    return name


def _check(q: Array, k_pages: Array, v_pages: Array, page_table: Array, lengths: Array) -> None:
    """Whether the shapes fit each other."""
    (B, H, h), K = q.shape, k_pages.shape[2]
    for wrong, message in (
        (k_pages.shape[3] != h, f"q has width {h} and k_pages {k_pages.shape[3]}"),
        (v_pages.shape[:3] != k_pages.shape[:3], f"k_pages is {k_pages.shape}, but v_pages {v_pages.shape}"),
        (H % K, f"{H} query heads are not a multiple of {K} key and value heads"),
        (
            len(page_table) != B or len(lengths) != B,
            f"{B} queries, {len(page_table)} rows of pages, {len(lengths)} lengths",
        ),
    ):
        if wrong:
            raise ValueError(f"decode_attention: {message}")
