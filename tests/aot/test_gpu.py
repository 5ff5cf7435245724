"""What only a GPU has: decoding from pages, and attention to the latents of MLA, wider than any table of others."""

import jax
import jax.numpy as jnp
import pytest

from tests.aot.targets import compiled
from zoo.kernels.attention import attention
from zoo.kernels.attention.paged import decode_attention
from zoo.kernels.masks import Causal

B, PAGES, PAGE, N = 4, 256, 16, 64


@pytest.mark.parametrize(
    ("heads", "widths", "dtype", "settings"),
    [
        ((32, 8), (64, 64), jnp.bfloat16, {}),
        ((32, 8), (128, 128), jnp.float32, {}),
        ((32, 8), (128, 128), jnp.bfloat16, {"window": 300, "softcap": 30.0, "alibi_slopes": jnp.ones(32)}),
        ((16, 4), (256, 256), jnp.bfloat16, {}),
        ((16, 16), (192, 128), jnp.float16, {}),
        ((128, 1), (576, 512), jnp.bfloat16, {}),
    ],
    ids=["h64", "float32", "all", "h256", "mla", "latents"],
)
def test_decoding_from_pages(heads, widths, dtype, settings, report):
    (H, K), (h, d) = heads, widths
    shapes = ((B, H, h), (PAGES, PAGE, K, h), (PAGES, PAGE, K, d))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    places = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, N), (B,))]
    program = compiled(lambda *args: decode_attention(*args, **settings), *arrays, *places, on="h200")
    report(program)
    assert program.kernels == 1


def test_attention_to_latents(report):
    q, k, v = (jax.ShapeDtypeStruct((1, 512, *size), jnp.bfloat16) for size in ((16, 576), (1, 576), (1, 512)))

    def run(q, k, v):
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, mask=Causal(), backend="pallas_gpu"), q, k, v)
        return pull(out)

    program = compiled(run, q, k, v, on="h200")
    report(program)
    assert program.kernels == 3
