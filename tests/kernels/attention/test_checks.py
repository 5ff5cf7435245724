"""Wrong arguments of attention are answered in one sentence, before anything is compiled."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from zoo.kernels.attention import attention, explain
from zoo.kernels.masks import ByHead, Causal, Chunked, Dilated, Summary, Window

GOOD = {"q": (2, 6, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 5)}


@pytest.mark.parametrize(
    ("shapes", "settings", "message"),
    [
        ({"q": (6, 4, 8)}, {}, r"q must be \[batch, length, heads, width\], but its shape is \(6, 4, 8\)"),
        ({"k": (3, 7, 2, 8)}, {}, "batches of 2, 3 and 2"),
        ({"k": (2, 7, 2, 9)}, {}, "q has width 8, but k has 9"),
        ({"v": (2, 6, 2, 5)}, {}, r"k \[B, S, K, h\] is \(2, 7, 2, 8\), but v \[B, S, K, d\] is \(2, 6, 2, 5\)"),
        ({"k": (2, 7, 3, 8), "v": (2, 7, 3, 5)}, {}, "4 query heads are not a multiple of 3 key and value heads"),
        ({}, {"mask": ByHead((Causal(),) * 3)}, "3 masks do not divide 4 query heads"),
        ({}, {"q_positions": (2, 6)}, "q_positions and kv_positions go together"),
        ({}, {"q_positions": (2, 6), "kv_positions": (2, 6)}, r"kv_positions must have the shape \(2, 7\)"),
        ({}, {"q_segment_ids": (1, 6), "kv_segment_ids": (2, 7)}, r"q_segment_ids must have the shape \(2, 6\)"),
        ({}, {"lengths": (6,)}, r"lengths must have the shape \(2,\)"),
        ({}, {"alibi_slopes": (2,)}, r"alibi_slopes must have the shape \(4,\)"),
        ({}, {"sinks": (4, 1)}, r"sinks must have the shape \(4,\)"),
        ({}, {"bias": (2, 2, 6, 7)}, r"bias must broadcast to \[B, H, T, S\] = \(2, 4, 6, 7\)"),
        ({}, {"softcap": 0.0}, "softcap=0.0 must be positive"),
        ({}, {"dropout_rate": 1.0}, "dropout_rate=1.0 must be at least 0 and less than 1"),
        ({}, {"dropout_rate": 0.5}, "dropout_rate=0.5 needs a dropout_key"),
        ({}, {"blocks": (0, 4)}, r"blocks=\(0, 4\) must be at least 1"),
        (
            {},
            {"backend": "chunkd"},
            "there is no backend 'chunkd', choose auto or one of dense.*; did you mean 'chunked'",
        ),
        ({}, {"backward": "flash"}, "there is no backend 'flash'"),
    ],
)
def test_a_wrong_argument_is_named(shapes, settings, message):
    arrays = [jnp.zeros(shape) for shape in (GOOD | shapes).values()]
    whole = {"positions", "segment_ids", "lengths"}
    for name, value in settings.items():
        if isinstance(value, tuple) and name != "blocks":
            is_whole = any(name.endswith(word) for word in whole)
            settings = settings | {name: jnp.zeros(value, jnp.int32 if is_whole else jnp.float32)}
    with pytest.raises(ValueError, match=message):
        # As users have it: the tests' own check of shapes would answer first.
        inspect.unwrap(attention)(*arrays, **({"mask": Causal()} | settings))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Causal(0), "Causal.window=0 must be at least 1"),
        (lambda: Window(-1, 0), "Window.left=-1 must be at least 0"),
        (lambda: Dilated(0), "Dilated.step=0 must be at least 1"),
        (lambda: Chunked(0), "Chunked.size=0 must be at least 1"),
        (lambda: Summary(4, 5), "Summary.count=5 must lie between 0 and size=4"),
    ],
)
def test_a_wrong_mask_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_explain_names_both_backends():
    q, k, v = (jax.ShapeDtypeStruct((1, 500, 4, 8), jnp.float32) for _ in "qkv")
    text = explain(q, k, v, mask=Causal(), backward="dense")
    assert "forward: chunked" in text and "backward: dense" in text
