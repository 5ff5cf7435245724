"""Floating-point operations of a forward pass, counted in the program that JAX traces; nothing is computed.

Attention and the experts of a sparse mixture are traced in plain, dense forms that mark how much of them counts:
the live share of the mask, and the experts that a token is sent to. A scan counts its body as often as it runs, which
XLA's own cost analysis does not.
"""

import math
from fractions import Fraction
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jaxtyping import Array

from zoo.config import ModelConfig, SoftConfig, SparseConfig
from zoo.describe.parameters import Parameters, blocks_of, live_pairs, mean_span
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams
from zoo.kernels.masks import Causal, Mask
from zoo.layers.ffn import ffn
from zoo.layers.logical import is_spec
from zoo.layers.moe.soft import segment_slots
from zoo.models.decoder import build

# Functions named so count as their share of the operations in them.
_SHARE = "counted_share"


def forward_flops(config: ModelConfig, length: int, specs: Any = None) -> float:
    """Operations of the products of one forward pass, per token of a sequence of `length` tokens.

    Args:
        specs: the model's abstract parameters; None makes them, which takes as long as the rest.
    """
    model = build(config).clone(attend=_attend, experts=_Experts(config.moe))
    specs = model.abstract_params() if specs is None else specs
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs, is_leaf=is_spec)
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    program = jax.make_jaxpr(lambda params, tokens: model.apply({"params": params}, tokens).logits)(params, tokens)
    # Without what only the routing statistics need.
    needed, _ = partial_eval.dce_jaxpr(program.jaxpr, [True])
    return float(_count(needed)) / length


def decoding_flops(config: ModelConfig, forward: float, length: int) -> float:
    """Operations of the last token of a sequence, from those of its tokens on average: it sees all before it."""
    late = sum(
        4 * b.n_heads * b.head_dim * (min(length, b.window or length) - mean_span(length, b.window))
        for b in blocks_of(config)
    )
    return forward + late


def merging_flops(config: ModelConfig, length: int) -> float:
    """Operations per token of merging the experts of soft mixtures: 2 E n D F for each of a sequence's segments."""
    merged = [b for b in blocks_of(config) if isinstance(b.moe, SoftConfig)]
    matrices = 3 if config.glu else 2
    return (
        sum(2 * b.moe.n_experts * matrices * b.d_model * b.moe.d_ff * segment_slots(b.moe, length) for b in merged)
        / length
    )


def recomputed_flops(config: ModelConfig, parts: dict[str, Parameters], forward: float, length: int) -> float:
    """Operations per token that `config.remat` repeats in the backward pass, at most.

    "full" repeats every block; "dots" attention and the experts of sparse mixtures, whose loops it does not see into;
    "dots_no_batch" the merged experts of soft mixtures too.
    """
    sparse, soft = isinstance(config.moe, SparseConfig), isinstance(config.moe, SoftConfig)
    if config.remat == "none":
        return 0.0
    if config.remat == "full":
        return forward - 2 * config.d_model * config.padded_vocab_size
    spans = sum(4 * b.n_heads * b.head_dim * mean_span(length, b.window) for b in blocks_of(config))
    repeated = sparse or (soft and config.remat == "dots_no_batch")
    return spans + (2.0 * parts["experts"].products if repeated else 0.0)


def live_share(mask: Mask, queries: int, keys: int) -> Fraction:
    """The share of query and key pairs of one document that a mask lets see each other."""
    return Fraction(live_pairs(queries, mask.window), queries * keys) if isinstance(mask, Causal) else Fraction(1)


def _shared(function: Any, share: Fraction) -> Any:
    """`function`, jitted under a name that says how much of it counts."""

    def named(*args: Any) -> Any:
        return function(*args)

    named.__name__ = f"{_SHARE}_{share.numerator}_{share.denominator}"
    return jax.jit(named)


def _attend(q: Array, k: Array, v: Array, *, mask: Mask, **settings: Any) -> Array:
    """The products of attention, of as many pairs as the mask leaves."""
    del settings

    def products(q: Array, k: Array, v: Array) -> Array:
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return jnp.einsum("BHTS,BSHd->BTHd", jnp.einsum("BTHh,BSHh->BHTS", q, k), v)

    return _shared(products, live_share(mask, q.shape[1], k.shape[1]))(q, k, v)


class _Experts:
    """The products of the k experts that a token is sent to; null experts, chosen alike, have none."""

    def __init__(self, moe: Any):
        self.share = Fraction(1)
        if isinstance(moe, SparseConfig):
            self.share = Fraction(moe.n_experts, moe.n_experts + moe.n_null_experts)

    def __call__(
        self, x: Array, indices: Array, weights: Array, params: FFNParams, hidden: HiddenUnits, share: None
    ) -> Array:
        del share  # a capacity is training's

        def products(x: Array, weights: Array, params: FFNParams) -> Array:
            first = jax.tree.map(lambda p: p[0], params)
            # The weights keep the router's product among what is needed.
            return sum(weights[:, i, None] * ffn(x, first, hidden) for i in range(indices.shape[-1]))

        return _shared(products, self.share)(x, weights.astype(x.dtype), params)


def _count(jaxpr: Any) -> Fraction:
    """Operations of all products below; those of a scan as often as it runs."""
    return sum((_of(equation) for equation in jaxpr.eqns), Fraction(0))


def _of(equation: Any) -> Fraction:
    if equation.primitive.name == "dot_general":
        return Fraction(_product(equation))
    inner = sum((_count(program) for program in _programs(equation.params)), Fraction(0))
    if equation.primitive.name == "while" and inner:
        raise NotImplementedError("a loop of unknown length holds products, which cannot be counted")
    name = str(equation.params.get("name", ""))
    if name.startswith(_SHARE):
        inner *= Fraction(*map(int, name.split("_")[-2:]))
    return inner * equation.params["length"] if equation.primitive.name == "scan" else inner


def _product(equation: Any) -> int:
    """2 for every multiplication: batch, rows, columns and what is summed over."""
    (summed, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in summed)


def _programs(params: dict[str, Any]) -> list[Any]:
    """The programs that an equation runs; of the branches of a choice, the last."""
    values = [p[-1] if isinstance(p, tuple) and p else p for p in params.values()]
    values = [p.jaxpr if isinstance(p, jex.core.ClosedJaxpr) else p for p in values]
    return [p for p in values if isinstance(p, jex.core.Jaxpr)]
