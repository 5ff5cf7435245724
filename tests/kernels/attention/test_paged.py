"""Attention to a paged cache: the same as to each row's own keys and values, in plain JAX and in kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.kernels.attention import attention
from zoo.kernels.attention.paged import decode_attention
from zoo.kernels.masks import Causal
from zoo.kernels.target import interpreting

# Where each backend is tried, and how near to the plain form it has to come.
BACKENDS = {
    "gathered": ("cpu", "cpu"),
    "paged_gpu": ("gpu", "NVIDIA H200"),
    "paged_tpu": ("tpu", "TPU v5 lite"),
}
LENGTHS = np.array([0, 1, 13, 70])


def cache(heads, widths, page, seed=0):
    """Queries, pages and a table in no order; what is behind a row's length is NaN, or another row's page."""
    rng = np.random.default_rng(seed)
    (H, K), (h, d), B = heads, widths, len(LENGTHS)
    n = -(-LENGTHS.max() // page) + 1
    table = rng.permutation(B * n).reshape(B, n)
    q, k, v = (rng.normal(size=shape) for shape in ((B, H, h), (B * n, page, K, h), (B * n, page, K, d)))
    slot = np.arange(n * page).reshape(n, page)
    for row, length in zip(table, LENGTHS, strict=True):
        for pages in (k, v):
            pages[row] = np.where((slot < length)[..., None, None], pages[row], np.nan)
    table = np.where(slot[:, 0] < LENGTHS[:, None], table, table[0, 0])
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v)], jnp.asarray(table, jnp.int32)


def of_row(b, arrays, table, window, **settings):
    """The same of one row, with `attention`."""
    (q, k, v), length = arrays, int(LENGTHS[b])
    k, v = (pages[table[b]].reshape(-1, *pages.shape[2:])[None, :length] for pages in (k, v))
    place = {"mask": Causal(window), "q_offset": length - 1, "return_lse": True, "backend": "dense"}
    out, lse = attention(q[b, None, None], k, v, **place, **settings)
    return out[0, 0], lse[0, :, 0]


@pytest.mark.parametrize(
    ("heads", "widths", "page", "settings"),
    [
        ((1, 1), (16, 16), 16, {}),
        ((8, 1), (40, 24), 7, {"softcap": 2.0}),
        ((6, 2), (16, 16), 16, {"window": 20, "scale": 0.3, "sinks": jnp.arange(6.0)}),
        ((6, 2), (80, 16), 32, {"alibi_slopes": jnp.linspace(0.1, 0.6, 6)}),
        ((160, 2), (16, 16), 64, {"window": 1}),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_pages_is_its_own_keys_and_values(backend, heads, widths, page, settings):
    arrays, table = cache(heads, widths, page)
    rest = {"window": None} | settings
    with interpreting(*BACKENDS[backend]):
        run = jax.jit(lambda *args: decode_attention(*args, **rest, return_lse=True, backend=backend))
        out, lse = run(*arrays, table, jnp.asarray(LENGTHS))
    np.testing.assert_array_equal(out[0], 0)
    assert np.isneginf(lse[0]).all()
    for b in range(1, len(LENGTHS)):
        right_out, right_lse = of_row(b, arrays, table, **rest)
        np.testing.assert_allclose(out[b], right_out, atol=3e-6)
        np.testing.assert_allclose(lse[b], right_lse, atol=3e-6)


def test_auto_takes_the_device_s_kernel_and_a_name_can_be_wrong():
    arrays, table = cache((2, 1), (16, 16), 16)
    args = (*arrays, table, jnp.asarray(LENGTHS))
    with interpreting("gpu", "NVIDIA H200"):
        assert "pallas_call" in str(jax.make_jaxpr(decode_attention)(*args))
    assert "pallas_call" not in str(jax.make_jaxpr(lambda *args: decode_attention(*args))(*args))
    with pytest.raises(ValueError, match="'paged_gpu' cannot run: Triton needs an NVIDIA GPU"):
        decode_attention(*args, backend="paged_gpu")
    with pytest.raises(ValueError, match="there is no backend 'pages', choose auto or one of gathered"):
        decode_attention(*args, backend="pages")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_pages": (8, 16, 1, 8)}, "q has width 16 and k_pages 8"),
        ({"v_pages": (8, 8, 1, 16)}, r"k_pages is \(8, 16, 1, 16\), but v_pages \(8, 8, 1, 16\)"),
        ({"k_pages": (8, 16, 3, 16), "v_pages": (8, 16, 3, 16)}, "2 query heads are not a multiple of 3"),
        ({"lengths": (3,)}, "2 queries, 2 rows of pages, 3 lengths"),
    ],
)
def test_a_wrong_shape_is_named(change, message):
    shapes = {
        "q": (2, 2, 16),
        "k_pages": (8, 16, 1, 16),
        "v_pages": (8, 16, 1, 16),
        "page_table": (2, 4),
        "lengths": (2,),
    }
    whole = ("page_table", "lengths")
    arrays = {n: jnp.zeros(s, jnp.int32 if n in whole else jnp.float32) for n, s in (shapes | change).items()}
    with pytest.raises(ValueError, match=message):
        decode_attention.__wrapped__(**arrays)
