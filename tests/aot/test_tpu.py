"""What only a TPU has: decoding from pages, blocks at the limits of its memories, and kernels on a mesh of chips."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.aot.targets import built, compiled, devices
from zoo.config import MeshConfig
from zoo.kernels.attention import attention
from zoo.kernels.attention.paged import decode_attention
from zoo.kernels.masks import Causal, Chunked, Dilated, Summary, big_bird
from zoo.parallel.attention import MeshAttention
from zoo.parallel.mesh import make_mesh

TPUS = ("v5e", "v5p", "v6e")
ALL = {"backend": "pallas_tpu", "backward": "pallas_tpu"}


def arrays(T, heads, widths, dtype=jnp.bfloat16, B=1, **layout):
    """Shapes of q, k, v and of the gradient of the output."""
    (H, K), (h, d) = heads, widths
    return [jax.ShapeDtypeStruct((B, T, *size), dtype, **layout) for size in ((H, h), (K, h), (K, d), (H, d))]


def gradients(q, k, v, g, attend=attention, **settings):
    out, pull = jax.vjp(lambda *qkv: attend(*qkv, **ALL, **settings), q, k, v)
    return out, pull(g)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("widths", [(256, 256), (576, 512)], ids=["h256", "latents"])
@pytest.mark.parametrize("chip", TPUS)
def test_wide_heads(chip, widths, dtype, report):
    program = compiled(partial(gradients, mask=Causal()), *arrays(2000, (4, 1), widths, dtype), on=chip)
    report(program)
    assert program.kernels == 3


@pytest.mark.parametrize(
    "mask",
    [big_bird(64, 1).masks[0], Causal() & (Chunked(100) | Summary(100, 4)), Causal(700) & Dilated(3)],
    ids=["big bird", "fixed", "dilated"],
)
def test_masks_that_divide(mask, report):
    report(compiled(partial(gradients, mask=mask), *arrays(1024, (2, 1), (128, 128)), on="v5e"))


@pytest.mark.parametrize("bias", [(1, 4, 512, 512), (1, 1, 512, 1), (1, 1, 1, 512)], ids=str)
def test_a_bias(bias, report):
    run = lambda q, k, v, bias: attention(q, k, v, mask=Causal(), bias=bias, backend="pallas_tpu")  # noqa: E731
    q, k, v, _ = arrays(512, (4, 2), (128, 128))
    program = compiled(run, q, k, v, jax.ShapeDtypeStruct(bias, jnp.float32), on="v5e")
    report(program)
    assert program.kernels == 1


@pytest.mark.parametrize(
    ("T", "blocks"),
    [(60_000, (128, 128)), (8192, (4096, 4096))],
    ids=["lists", "blocks"],
)
def test_what_is_just_not_refused_fits(T, blocks, report):
    run = partial(gradients, mask=Causal(), blocks=blocks)
    report(compiled(run, *arrays(T, (1, 1), (128, 128)), on="v5e"))


@pytest.mark.parametrize(
    ("heads", "widths", "dtype", "settings"),
    [
        ((32, 8), (128, 128), jnp.bfloat16, {}),
        ((32, 2), (128, 128), jnp.float32, {}),
        ((32, 8), (256, 128), jnp.bfloat16, {"window": 300, "softcap": 30.0, "alibi_slopes": jnp.ones(32)}),
        ((128, 1), (640, 512), jnp.bfloat16, {}),
    ],
    ids=["plain", "float32", "all", "latents"],
)
@pytest.mark.parametrize("chip", TPUS)
def test_decoding_from_pages_copies_no_page(chip, heads, widths, dtype, settings, report):
    (H, K), (h, d) = heads, widths
    pages = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, H, h), (256, 16, K, h), (256, 16, K, d))]
    places = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 64), (4,))]
    run = lambda *args: decode_attention(*args, **settings, backend="paged_tpu")  # noqa: E731
    program = compiled(run, *pages, *places, on=chip)
    report(program)
    assert program.kernels == 1
    # A copy of the cache would be as large as the keys are.
    assert program.compiled.memory_analysis().temp_size_in_bytes < 2**20


def test_on_a_mesh_every_chip_has_its_kernels_and_nothing_is_sent():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), devices("tpu", "v5e:2x2"))
    whole = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor"))
    args = arrays(1024, (4, 2), (128, 128), B=4, sharding=whole)
    run = jax.jit(partial(gradients, attend=MeshAttention(mesh), mask=Causal()), out_shardings=whole)
    program = built(run, *args, mesh=mesh)
    assert program.kernels == 3
    assert not any(name in program.text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    with pytest.raises(NotImplementedError, match="wrap the call in a shard_map"):
        built(jax.jit(partial(gradients, mask=Causal()), out_shardings=whole), *args, mesh=mesh)
