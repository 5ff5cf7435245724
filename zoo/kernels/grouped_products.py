"""Grouped products and networks with gradients, from three products that a backend has.

Accelerators have whole products that are fast; here they are put together as `zoo.kernels.grouped_matmul`, which
has the plain forms, promises: exact zeros for rows beyond sum(counts) and for the gradients of empty groups.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.kernels.glu import HiddenUnits


class Products(NamedTuple):
    """What a backend computes, of rows [N, D] or [N, F] sorted by group, matrices w [E, D, F] and counts [E].

    Rows from sum(counts) on, which may hold anything, give exactly 0 and add exactly 0.

    Attributes:
        rows: (x [N, D], w, counts) -> x[n] @ w[e], [N, F] in x's dtype.
        back: (g [N, F], w, counts) -> g[n] @ w[e].T, [N, D] in g's dtype.
        outer: (x [N, D], g [N, F], counts) -> sum_n x[n].T @ g[n] of each group, [E, D, F], summed and
            returned in float32.
    """

    rows: Callable[[Array, Array, Array], Array]
    back: Callable[[Array, Array, Array], Array]
    outer: Callable[[Array, Array, Array], Array]


def matmul(
    products: Products, x: Float[Array, "N D"], w: Float[Array, "E D F"], counts: Int[Array, "E"]
) -> Float[Array, "N F"]:
    """`grouped_matmul`."""
    return products.rows(x, w, counts)


def matmul_gradients(
    products: Products,
    x: Float[Array, "N D"],
    w: Float[Array, "E D F"],
    counts: Int[Array, "E"],
    g: Float[Array, "N F"],
) -> tuple[Float[Array, "N D"], Float[Array, "E D F"]]:
    """Those of x and w, of `grouped_matmul`, where its result has the gradient g."""
    return products.back(g, w, counts), products.outer(x, g, counts).astype(w.dtype)


def ffn(
    products: Products,
    x: Float[Array, "N D"],
    scale: Float[Array, "N 1"],
    params: Any,
    counts: Int[Array, "E"],
    hidden: HiddenUnits,
) -> tuple[Float[Array, "N D"], Float[Array, "N F"] | None, Float[Array, "N F"]]:
    """`grouped_ffn` and what its gradient needs: the products of gate, None without one, and up, biases added.

    Args:
        params: an FFNParams.
    """
    rows = _Rows(counts, x.shape[0])
    gate, up = (
        None if w is None else rows.add(products.rows(x, w, counts), b)
        for w, b in ((params.w_gate, params.b_gate), (params.w_up, params.b_up))
    )
    scale = jnp.where(rows.live, scale, 0)
    units = (hidden(gate, up, rows.own_column(params.beta)) * scale).astype(x.dtype)
    y = products.rows(units, params.w_down, counts)
    return y if params.b_down is None else y + (rows.own(params.b_down) * scale).astype(y.dtype), gate, up


def ffn_gradients(
    products: Products,
    x: Float[Array, "N D"],
    scale: Float[Array, "N 1"],
    gate: Float[Array, "N F"] | None,
    up: Float[Array, "N F"],
    params: Any,
    counts: Int[Array, "E"],
    g: Float[Array, "N D"],
    hidden: HiddenUnits,
) -> tuple[Float[Array, "N D"], Float[Array, "N 1"], Any]:
    """Those of x, scale and params, of `grouped_ffn`, where its result has the gradient g."""
    rows, wide = _Rows(counts, x.shape[0]), scale.dtype
    scale, g = jnp.where(rows.live, scale, 0), jnp.where(rows.live, g, 0)
    # A beta for each unit, so that the gradient of the one they share is summed in float32.
    beta = None if params.beta is None else jnp.broadcast_to(rows.own_column(params.beta), up.shape)
    units, pull = jax.vjp(hidden, gate, up, beta)
    d_scaled = products.back(g, params.w_down, counts)
    d_scale = jnp.sum(d_scaled.astype(wide) * units.astype(wide), axis=1, keepdims=True)
    if params.b_down is not None:
        d_scale += jnp.sum(g.astype(wide) * rows.own(params.b_down).astype(wide), axis=1, keepdims=True)
    d_gate, d_up, d_beta = pull((d_scaled * scale).astype(units.dtype))
    dx = products.back(d_up, params.w_up, counts)
    dx = dx if gate is None else dx + products.back(d_gate, params.w_gate, counts)
    total = lambda d: products.outer(jnp.ones_like(d[:, :1]), d, counts)[:, 0]  # noqa: E731
    gradients = params._replace(
        w_gate=None if gate is None else products.outer(x, d_gate, counts),
        w_up=products.outer(x, d_up, counts),
        w_down=products.outer((units * scale).astype(x.dtype), g, counts),
        b_gate=None if params.b_gate is None else total(d_gate),
        b_up=None if params.b_up is None else total(d_up),
        b_down=None if params.b_down is None else total((g * scale).astype(g.dtype)),
        beta=None if beta is None else total(jnp.sum(d_beta.astype(wide), axis=1, keepdims=True))[:, 0],
    )
    return dx, d_scale, jax.tree.map(lambda d, p: d.astype(p.dtype), gradients, params)


class _Rows:
    """Which group each of N rows belongs to, and what is its own of that group's; 0 beyond sum(counts)."""

    def __init__(self, counts: Int[Array, "E"], n_rows: int):
        ends = jnp.cumsum(counts)
        at = jnp.arange(n_rows)
        self.group = jnp.searchsorted(ends, at, side="right")
        self.live = (at < ends[-1])[:, None]

    def own(self, of_groups: Float[Array, "E ..."]) -> Float[Array, "N ..."]:
        return jnp.take(of_groups, self.group, axis=0, mode="fill", fill_value=0)

    def own_column(self, of_groups: Float[Array, "E"] | None) -> Float[Array, "N 1"] | None:
        return None if of_groups is None else self.own(of_groups)[:, None]

    def add(self, y: Float[Array, "N F"], bias: Float[Array, "E F"] | None) -> Float[Array, "N F"]:
        return y if bias is None else y + self.own(bias)
