"""Other people's attention behind our contract: each refuses what it cannot do, or would do otherwise."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.kernels.attention.problem import Gradients, Operands, Settings
from zoo.kernels.masks import Causal, Full
from zoo.kernels.target import Target


def cudnn_refuses(operands: Operands, settings: Settings, device: Target, way: str) -> str | None:
    """Why `jax.nn.dot_product_attention(implementation="cudnn")` cannot do this, or None.

    Its log sums come rounded to the dtype of the output, so neither another backend's gradient nor anybody else can
    use them; its own gradient is taken of a second forward pass.
    """
    q, k, v, mask = operands.q, operands.k, operands.v, settings.mask
    (T, _, h), S, d = q.shape[1:], k.shape[1], v.shape[-1]
    here = jax.devices()[0]
    if device.platform != "gpu" or device.interpret or here.platform != "gpu":
        return "cuDNN is asked about the GPU while tracing, and this process has none"
    most = 256 if float(here.compute_capability) >= 9 else 128
    for wrong, reason in (
        (way == "forward" and settings.backward != "cudnn", "it gives no log sums, so backward must be 'cudnn' too"),
        (settings.log_sums, "its log sums are not float32, and they are asked for"),
        (settings.offset is None, "it knows no positions"),
        (settings.segmented, "it knows no documents, nor lengths"),
        (settings.softcap is not None, "it knows no softcap"),
        (operands.slopes is not None, "it knows no ALiBi"),
        (operands.bias is not None, "its gradient of a bias is wrong at times (jax#32242, jax#30593)"),
        (operands.seeds is not None, "JAX passes it no dropout"),
        (not isinstance(mask, Causal | Full), f"it knows causal masks and windows, and not {type(mask).__name__}"),
        (isinstance(mask, Causal) and (T != S or settings.offset), f"of {T} queries and {S} keys it aligns others"),
        (h != d or h > most or h % 8, f"widths {h} and {d} are not one multiple of 8 up to {most}"),
        (
            {x.dtype.name for x in (q, k, v)} not in ({"bfloat16"}, {"float16"}),
            f"q, k and v are {q.dtype.name}, {k.dtype.name} and {v.dtype.name}, not one of bfloat16 and float16",
        ),
    ):
        if wrong:
            return reason
    return None


def cudnn_forward(operands: Operands, settings: Settings) -> tuple[Float[Array, "B T H d"], Float[Array, "B H T"]]:
    """As `dense.forward`, but its log sums are NaN: `cudnn_refuses` lets nobody read them."""
    B, T, H, _ = operands.q.shape
    out = _cudnn(settings, operands.q, operands.k, operands.v)
    return out, jnp.full((B, H, T), jnp.nan, jnp.float32)


def cudnn_backward(operands: Operands, settings: Settings, out: Any, lse: Any, d_out: Array, d_lse: Any) -> Gradients:
    """As `dense.backward`, of a loss that the log sums are not in."""
    del out, lse, d_lse
    _, pull = jax.vjp(lambda *qkv: _cudnn(settings, *qkv), operands.q, operands.k, operands.v)
    return Gradients(*pull(d_out))


def _cudnn(settings: Settings, q: Array, k: Array, v: Array) -> Array:
    window = settings.mask.window if isinstance(settings.mask, Causal) else None
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=settings.scale,
        is_causal=isinstance(settings.mask, Causal),
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
