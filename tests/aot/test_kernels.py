"""Every backend of every kernel compiles, forward and backward, for every chip that it does not refuse."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from tests.aot.targets import CHIPS, compiled, one
from zoo.kernels.attention import attention
from zoo.kernels.attention.dispatch import BACKENDS
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams, grouped_ffn, grouped_matmul
from zoo.kernels.masks import Causal, Mask

# Backends of attention that are plain JAX: XLA compiles them as it does the rest of a model.
PLAIN = {"dense": 128, "chunked": 512}  # and a length that each is for
# Backends that are other people's libraries, which are asked about the device while tracing.
LIBRARIES = ("cudnn",)
KERNELS = [name for name in BACKENDS if name not in (*PLAIN, *LIBRARIES)]


class Problem(NamedTuple):
    """Sizes of attention, and what is asked of it."""

    T: int = 512
    h: int = 128
    d: int = 128
    dtype: type = jnp.bfloat16
    mask: Mask = Causal()
    segmented: bool = False
    softcap: float | None = None
    dropout_rate: float = 0.0
    alibi: bool = False
    H: int = 4
    K: int = 2


PROBLEMS = {
    "h128": Problem(),
    "h64": Problem(h=64, d=64),
    "h80": Problem(h=80, d=80),
    "h256": Problem(h=256, d=256),
    "mla": Problem(h=192, d=128, K=4),
    "float32": Problem(dtype=jnp.float32),
    "packed": Problem(mask=Causal(window=200), segmented=True, softcap=30.0),
    "T500": Problem(T=500),
    "alibi": Problem(alibi=True),
    "dropout": Problem(dropout_rate=0.1),
}


def shapes(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    """q, k, v, segment ids and the gradient of the output."""
    sizes = ((problem.H, problem.h), (problem.K, problem.h), (problem.K, problem.d), (problem.H, problem.d))
    q, k, v, g = (jax.ShapeDtypeStruct((2, problem.T, *size), problem.dtype) for size in sizes)
    return [q, k, v, jax.ShapeDtypeStruct((2, problem.T), jnp.int32), g]


def with_gradients(problem: Problem, backend: str) -> Callable:
    """A function of `shapes`: the output and the gradients of q, k and v."""
    settings: dict[str, Any] = {"backend": backend, "backward": backend}
    settings |= {name: getattr(problem, name) for name in ("mask", "softcap", "dropout_rate")}

    def run(q, k, v, ids, g):
        documents = {"q_segment_ids": ids, "kv_segment_ids": ids} if problem.segmented else {}
        arrays = {"alibi_slopes": jnp.ones(problem.H) if problem.alibi else None, "dropout_key": jax.random.key(0)}
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, **settings, **documents, **arrays), q, k, v)
        return out, pull(g)

    return run


def refusal(problem: Problem, backend: str, chip: str) -> str | None:
    """Why a backend does not compute this on a chip; None if it does."""
    try:
        with jax.set_mesh(one(chip)):
            jax.eval_shape(with_gradients(problem, backend), *shapes(problem))
    except ValueError as error:
        if f"backend {backend!r} cannot run" not in str(error):
            raise
        return str(error)


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("chip", ["v5e", "h200"])
def test_plain_attention(chip, backend, report):
    problem = Problem(T=PLAIN[backend])
    report(compiled(with_gradients(problem, backend), *shapes(problem), on=chip))


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("chip", CHIPS)
def test_attention_kernels(chip, backend, problem, report):
    problem = PROBLEMS[problem]
    if reason := refusal(problem, backend, chip):
        pytest.skip(reason)
    program = compiled(with_gradients(problem, backend), *shapes(problem), on=chip)
    report(program)
    assert program.kernels >= 2


@pytest.mark.parametrize("backend", KERNELS)
def test_attention_kernels_have_a_chip(backend):
    assert any(refusal(PROBLEMS["h128"], backend, chip) is None for chip in CHIPS)


N, E, D, F = 1024, 8, 256, 512


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("chip", CHIPS)
def test_grouped_products(chip, dtype, report):
    def run(x, w, counts, g):
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, counts), x, w)
        return y, pull(g)

    x, w, g = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((N, D), (E, D, F), (N, F)))
    report(compiled(run, x, w, jax.ShapeDtypeStruct((E,), jnp.int32), g, on=chip))


@pytest.mark.parametrize("chip", CHIPS)
def test_grouped_networks(chip, report):
    def run(x, scale, params, counts, g):
        y, pull = jax.vjp(lambda *args: grouped_ffn(*args, counts, HiddenUnits("silu")), x, scale, params)
        return y, pull(g)

    x, scale = jax.ShapeDtypeStruct((N, D), jnp.bfloat16), jax.ShapeDtypeStruct((N, 1), jnp.float32)
    params = FFNParams(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((E, D, F), (E, D, F), (E, F, D))))
    report(compiled(run, x, scale, params, jax.ShapeDtypeStruct((E,), jnp.int32), x, on=chip))
