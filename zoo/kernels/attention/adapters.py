"""Other people's attention behind our contract: each refuses what it cannot do, or would do otherwise."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jaxtyping import Array, Float

from zoo.kernels.attention.problem import Gradients, Operands, Settings
from zoo.kernels.attention.tpu_blocks import LANES
from zoo.kernels.masks import Causal, Full
from zoo.kernels.target import Target, target


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


def splash_refuses(operands: Operands, settings: Settings, device: Target, way: str) -> str | None:
    """Why JAX's splash attention for TPUs cannot do this, or None.

    It gives rows that see nothing a mean of values, and gradients, so it gets only problems without such rows.
    """
    mask, T, S = settings.mask, operands.q.shape[1], operands.k.shape[1]
    dtypes = {x.dtype.name for x in (operands.q, operands.k, operands.v)}
    for wrong, reason in (
        (device.platform != "tpu", f"it is for TPUs, and the program is for {device.kind!r}"),
        (
            dtypes != {"bfloat16"},
            f"q, k and v have dtypes {', '.join(sorted(dtypes))}, and only bfloat16 is exact in it",
        ),
        (settings.offset is None, "it knows no positions"),
        (settings.segmented, "it gives rows of padding a mean of values"),
        (operands.slopes is not None, "it knows no ALiBi"),
        (operands.bias is not None, "it knows no bias"),
        (operands.seeds is not None, "it knows no dropout"),
        (not isinstance(mask, Causal | Full), f"it knows causal masks and windows, and not {type(mask).__name__}"),
        (_has_dead_rows(settings, T, S), "some queries see no key, and it gives them a mean of values"),
        (T % LANES or S % LANES, f"its lengths are multiples of {LANES}, and these are {T} and {S}"),
        (
            settings.blocks and any(x % n or n % LANES for x, n in zip((T, S), settings.blocks, strict=True)),
            f"blocks={settings.blocks} are not multiples of {LANES} that divide {T} and {S}",
        ),
        (way == "backward" and settings.log_sums, "it has no gradient of log sums, and they are asked for"),
    ):
        if wrong:
            return reason
    return None


def _has_dead_rows(settings: Settings, T: int, S: int) -> bool:
    if not isinstance(settings.mask, Causal) or settings.offset is None:
        return False
    window, last = settings.mask.window, settings.offset + T - 1
    return settings.offset < 0 or (window is not None and last - window + 1 >= S)


def splash_forward(operands: Operands, settings: Settings) -> tuple[Float[Array, "B T H d"], Float[Array, "B H T"]]:
    """As `dense.forward`."""
    out, (lse,) = jax.vmap(_splash(operands, settings, save_residuals=True))(*_by_head(operands, settings))
    return out.swapaxes(1, 2), lse


def splash_backward(operands: Operands, settings: Settings, out: Any, lse: Any, d_out: Array, d_lse: Any) -> Gradients:
    """As `dense.backward`, of a loss that the log sums are not in; output and log sums are made a second time."""
    del out, lse, d_lse
    kernel = _splash(operands, settings, save_residuals=False)

    def run(q: Array, k: Array, v: Array) -> Array:
        return jax.vmap(kernel)(*_by_head(operands._replace(q=q, k=k, v=v), settings)).swapaxes(1, 2)

    _, pull = jax.vjp(run, operands.q, operands.k, operands.v)
    return Gradients(*pull(d_out))


def _by_head(operands: Operands, settings: Settings) -> tuple[Array, ...]:
    """Scaled queries, keys and values with heads before lengths."""
    q = (operands.q.astype(jnp.float32) * settings.scale).astype(operands.q.dtype)
    return tuple(x.swapaxes(1, 2) for x in (q, operands.k, operands.v))


def _splash(operands: Operands, settings: Settings, save_residuals: bool) -> Any:
    """Its kernel for one row of the batch."""
    (T, H), S, mask = operands.q.shape[1:3], operands.k.shape[1], settings.mask
    q, kv = settings.blocks or (_block(T), _block(S))
    if isinstance(mask, Full):
        one = splash_attention_mask.FullMask((T, S))
    else:
        left = None if mask.window is None else mask.window - 1
        one = splash_attention_mask.LocalMask((T, S), (left, 0), settings.offset)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_q_dq=q,
        block_kv_dq=kv,
    )
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([one] * H),
        block_sizes=sizes,
        save_residuals=save_residuals,
        attn_logits_soft_cap=settings.softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=target().interpret,
    )


def _block(length: int) -> int:
    """The longest block to 512 that divides a length."""
    return next(n for n in range(512, 0, -LANES) if length % n == 0)
