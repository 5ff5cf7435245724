"""Whether the arguments of attention fit each other, before anything is compiled."""

from typing import Any

from zoo.kernels.masks import Mask


def check_arrays(q: Any, k: Any, v: Any, masks: tuple[Mask, ...]) -> None:
    """Queries, keys and values, and the groups of heads that have masks."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"attention: {name} must be [batch, length, heads, width], but its shape is {x.shape}")
    (B, _, H, h), (S, K), groups = q.shape, k.shape[1:3], len(masks)
    for wrong, message in (
        (len(k) != B or len(v) != B, f"q, k and v have batches of {B}, {len(k)} and {len(v)}; they must be equal"),
        (k.shape[3] != h, f"q has width {h}, but k has {k.shape[3]}; they must be equal"),
        (v.shape[1:3] != (S, K), f"k [B, S, K, h] is {k.shape}, but v [B, S, K, d] is {v.shape}"),
        (H % K, f"{H} query heads are not a multiple of {K} key and value heads"),
        (H % groups, f"{groups} masks do not divide {H} query heads"),
        (K % groups and groups % K, f"{groups} masks and {K} key and value heads do not divide each other"),
    ):
        if wrong:
            raise ValueError(f"attention: {message}")


def check_shapes(q: Any, k: Any, **arrays: Any) -> None:
    """All other arrays, by name; None for those that are not given."""
    (B, T, H), S = q.shape[:3], k.shape[1]
    for name in ("positions", "segment_ids"):
        if (arrays[f"q_{name}"] is None) != (arrays[f"kv_{name}"] is None):
            raise ValueError(f"attention: q_{name} and kv_{name} go together; give both or none")
        _check_shape(arrays, f"q_{name}", (B, T))
        _check_shape(arrays, f"kv_{name}", (B, S))
    _check_shape(arrays, "lengths", (B,))
    _check_shape(arrays, "alibi_slopes", (H,))
    _check_shape(arrays, "sinks", (H,))
    bias, whole = arrays["bias"], (B, H, T, S)
    if bias is not None and (bias.ndim != 4 or any(n not in (1, m) for n, m in zip(bias.shape, whole, strict=True))):
        raise ValueError(f"attention: bias must broadcast to [B, H, T, S] = {whole}, but its shape is {bias.shape}")


def _check_shape(arrays: dict[str, Any], name: str, shape: tuple[int, ...]) -> None:
    x = arrays[name]
    if x is not None and x.shape != shape:
        raise ValueError(f"attention: {name} must have the shape {shape}, but it has {x.shape}")


def check_numbers(softcap: float | None, dropout_rate: float, blocks: tuple[int, int] | None) -> None:
    """Numbers that have no meaning outside of their range."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"attention: softcap={softcap} must be positive, or None for none")
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"attention: dropout_rate={dropout_rate} must be at least 0 and less than 1")
    if blocks is not None and min(blocks) < 1:
        raise ValueError(f"attention: blocks={blocks} must be at least 1")
