"""Attention and its gradients in NumPy float64, written from the formulas, and problems to compare backends on."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zoo.kernels.attention import attention
from zoo.kernels.attention.problem import kept
from zoo.kernels.masks import Mask, head_masks


@dataclass
class Problem:
    """Arrays and keywords of `attention`, and the gradients that come down on its two results.

    Attributes:
        arrays: name -> array, of what has a gradient: q, k, v, and alibi_slopes, bias, sinks where there are any.
        settings: other keywords.
        d_out, d_lse: [B, T, H, d] and [B, H, T].
    """

    arrays: dict[str, np.ndarray]
    settings: dict[str, Any]
    d_out: np.ndarray
    d_lse: np.ndarray
    names: list[str] = field(init=False)

    def __post_init__(self):
        self.names = ["out", "lse", *(f"d_{name}" for name in self.arrays)]


def problem(T, S, heads, widths, mask, seed=0, B=2, slopes=False, bias=None, sinks=False, **settings) -> Problem:
    """A random problem; `bias` is the shape of one."""
    rng = np.random.default_rng(seed)
    (H, K), (h, d) = heads, widths
    shapes = {"q": (B, T, H, h), "k": (B, S, K, h), "v": (B, S, K, d)}
    shapes |= {"alibi_slopes": (H,)} if slopes else {}
    shapes |= {"bias": bias} if bias else {}
    shapes |= {"sinks": (H,)} if sinks else {}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return Problem(arrays, {"mask": mask, **settings}, rng.normal(size=(B, T, H, d)), rng.normal(size=(B, H, T)))


def rounded(problem: Problem, dtype: Any) -> Problem:
    """The problem with what a dtype keeps of its queries, keys, values and of the gradient of its output."""
    keep = lambda x: np.asarray(jnp.asarray(x, dtype), np.float64)  # noqa: E731
    arrays = {n: keep(x) if n in "qkv" else np.asarray(x, np.float32) for n, x in problem.arrays.items()}
    return Problem(arrays, problem.settings, keep(problem.d_out), np.asarray(problem.d_lse, np.float32))


def run(problem: Problem, dtype: Any, **how: Any) -> list[np.ndarray]:
    """Output, log sums and all gradients of `attention`, as float64; -inf of the log sums as 0."""
    cast = lambda name, x: jnp.asarray(x, dtype if name in "qkv" else jnp.promote_types(dtype, jnp.float32))  # noqa: E731
    arrays = {name: cast(name, x) for name, x in problem.arrays.items()}
    wide = jnp.promote_types(dtype, jnp.float32)

    @jax.jit
    def both(arrays: Any) -> Any:
        def f(arrays: Any) -> Any:
            rest = {name: x for name, x in arrays.items() if name not in "qkv"}
            q, k, v = (arrays[name] for name in "qkv")
            return attention(q, k, v, **problem.settings, **rest, **how, return_lse=True)

        results, pull = jax.vjp(f, arrays)
        return results, pull((jnp.asarray(problem.d_out, dtype), jnp.asarray(problem.d_lse, wide)))[0]

    (out, lse), grads = both(arrays)
    return [np.asarray(x, np.float64) for x in (out, jnp.where(jnp.isneginf(lse), 0, lse), *(grads[n] for n in arrays))]


def expected(problem: Problem) -> list[np.ndarray]:
    """The same, from the formulas."""
    q, k, v = (problem.arrays[name] for name in "qkv")
    (B, T, H, h), (S, K), d = q.shape, k.shape[1:3], v.shape[3]
    k, v = (np.repeat(x, H // K, axis=2) for x in (k, v))
    scale, softcap = problem.settings.get("scale") or h**-0.5, problem.settings.get("softcap")
    seen, distance = _seen(problem.settings, B, H, T, S)
    scores = np.einsum("BTHh,BSHh->BHTS", q, k) * scale
    slope = 1.0
    if softcap is not None:
        tanh = np.tanh(scores / softcap)
        scores, slope = softcap * tanh, 1 - tanh**2
    slopes, bias, sinks = (problem.arrays.get(name) for name in ("alibi_slopes", "bias", "sinks"))
    scores = scores if slopes is None else scores - slopes[:, None, None] * distance[:, None]
    scores = scores if bias is None else scores + bias
    scores = np.where(seen, scores, -np.inf)
    sink = np.full((H, 1, 1), -np.inf) if sinks is None else sinks[:, None, None]
    sink = np.where(seen.any(-1, keepdims=True), sink, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), sink)
    top = np.where(np.isneginf(top), 0, top)
    total = np.exp(scores - top).sum(-1, keepdims=True) + np.exp(sink - top)
    safe = np.where(total == 0, 1, total)
    weights, of_sink = np.exp(scores - top) / safe, np.exp(sink - top) / safe
    keep = _kept(problem.settings, B, H, T, S)
    out = np.einsum("BHTS,BSHd->BTHd", weights * keep, v)
    lse = np.where(total == 0, 0, top + np.log(safe))[..., 0]
    # Gradients, from the last step to the first.
    d_out, d_lse = problem.d_out, problem.d_lse[..., None]
    d_v = np.einsum("BHTS,BTHd->BSHd", weights * keep, d_out)
    d_weights = np.einsum("BTHd,BSHd->BHTS", d_out, v) * keep
    inner = (d_weights * weights).sum(-1, keepdims=True)
    d_scores = weights * (d_weights - inner + d_lse)
    found = {"bias": None if bias is None else _summed_to(d_scores, bias.shape)}
    found["alibi_slopes"] = -(d_scores * distance[:, None]).sum((0, 2, 3))
    found["sinks"] = (of_sink * (d_lse - inner)).sum((0, 2, 3))
    d_products = d_scores * slope * scale
    found["q"] = np.einsum("BHTS,BSHh->BTHh", d_products, k)
    found["k"] = np.einsum("BHTS,BTHh->BSHh", d_products, q).reshape(B, S, K, H // K, h).sum(3)
    found["v"] = d_v.reshape(B, S, K, H // K, d).sum(3)
    return [out, lse, *(found[name] for name in problem.arrays)]


def _seen(settings: dict[str, Any], B: int, H: int, T: int, S: int) -> tuple[np.ndarray, np.ndarray]:
    """Which pairs count [B, H, T, S], and the distances [B, T, S]."""
    offset = settings.get("q_offset", 0)
    q_at = np.asarray(settings.get("q_positions", np.broadcast_to(offset + np.arange(T), (B, T))))
    k_at = np.asarray(settings.get("kv_positions", np.broadcast_to(np.arange(S), (B, S))))
    q_ids = np.asarray(settings.get("q_segment_ids", np.ones((B, T), int)))
    k_ids = np.asarray(settings.get("kv_segment_ids", np.ones((B, S), int)))
    if settings.get("lengths") is not None:
        k_ids = np.where(np.arange(S) < np.asarray(settings["lengths"])[:, None], k_ids, 0)
    masks: tuple[Mask, ...] = head_masks(settings["mask"])
    allowed = np.stack([mask.allows(q_at[:, :, None], k_at[:, None, :]) for mask in masks], 1)
    same = (q_ids[:, :, None] == k_ids[:, None, :]) & (q_ids > 0)[:, :, None]
    seen = np.repeat(allowed, H // len(masks), axis=1) & same[:, None]
    return seen, q_at[:, :, None] - k_at[:, None, :]


def _kept(settings: dict[str, Any], B: int, H: int, T: int, S: int) -> np.ndarray:
    rate = settings.get("dropout_rate", 0.0)
    if rate == 0:
        return np.ones(())
    seeds = jax.random.bits(settings["dropout_key"], (B, H), jnp.uint32)[:, :, None, None]
    return np.asarray(kept(seeds, jnp.arange(T)[:, None], jnp.arange(S)[None, :], rate), np.float64)


def _summed_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return x.sum(tuple(axis for axis, n in enumerate(shape) if n == 1), keepdims=True).reshape(shape)


def assert_as_exact_as_dense(problem: Problem, dtype: Any, **how: Any) -> None:
    """The error of a backend is at most twice that of the plain form in the same dtype, or rounding."""
    problem = rounded(problem, dtype)
    exact = expected(problem)
    plain, own = run(problem, dtype, backend="dense", backward="dense"), run(problem, dtype, **how)
    # Roundings of the largest value: of weights and gradients before a product, or of long sums in the wide types.
    tiny = float(jnp.finfo(dtype).eps) * (4 if jnp.dtype(dtype).itemsize == 2 else 16)
    for name, right, by_dense, by_backend in zip(problem.names, exact, plain, own, strict=True):
        assert by_backend.shape == right.shape, name
        worst = lambda x, right=right: float(np.max(np.abs(x - right), initial=0))  # noqa: E731
        bound = 2 * worst(by_dense) + tiny * max(1.0, float(np.max(np.abs(right), initial=0)))
        assert worst(by_backend) <= bound, f"{name}: {worst(by_backend):.2e} > {bound:.2e}"
