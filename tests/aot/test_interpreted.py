"""TPU interpret mode finds what it is there to find."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.aot.interpreted import Race, interpreted
from zoo.kernels.target import target


def rows(kernel, x, out_at, scratch=()):
    """A kernel over blocks of 8 rows, which two cores share."""
    width = x.shape[1]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 8,),
        in_specs=[pl.BlockSpec((8, width), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, width), lambda i: (out_at(i), 0)),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )(x)


def doubled(x, wait_first):
    """Twice x, by way of a copy that is waited for before it is read, or after."""

    def kernel(x_ref, y_ref, scratch, semaphore):
        copy = pltpu.make_async_copy(x_ref, scratch, semaphore)
        copy.start()
        if wait_first:
            copy.wait()
        y_ref[...] = 2 * scratch[...]
        if not wait_first:
            copy.wait()

    return rows(kernel, x, lambda i: i, [pltpu.VMEM((8, x.shape[1]), x.dtype), pltpu.SemaphoreType.DMA])


def copied(x, out_at):
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    return rows(kernel, x, out_at)


def x_of(n_rows):
    return jnp.arange(n_rows * 128, dtype=jnp.float32).reshape(n_rows, 128)


@pytest.mark.parametrize("n_rows", [8, 32])
def test_a_right_kernel_gives_its_numbers(n_rows):
    x = x_of(n_rows)
    np.testing.assert_array_equal(interpreted(partial(doubled, wait_first=True), x), 2 * x)


@pytest.mark.parametrize(
    "wrong", [partial(doubled, wait_first=False), partial(copied, out_at=lambda i: 0)], ids=["dma", "cores"]
)
def test_a_race_is_found_and_the_next_kernel_runs(wrong):
    x = x_of(32)
    with pytest.raises(Race):
        interpreted(wrong, x)
    np.testing.assert_array_equal(interpreted(partial(copied, out_at=lambda i: i), x), x)


def test_what_nobody_has_written_is_nan():
    def kernel(x_ref, y_ref):
        y_ref[:4] = x_ref[:4]

    y = interpreted(lambda x: rows(kernel, x, lambda i: i), x_of(8))
    assert np.isnan(y[4:]).all() and not np.isnan(y[:4]).any()


def test_a_program_without_a_kernel_is_no_test():
    with pytest.raises(ValueError, match="no Pallas kernel"):
        interpreted(lambda x: x + 1, x_of(8))


def test_a_race_in_the_first_of_two_kernels_is_found():
    with pytest.raises(Race):
        interpreted(lambda x: copied(copied(x, lambda i: 0), lambda i: i), x_of(32))


def test_programs_are_traced_as_for_a_tpu():
    seen = []
    interpreted(lambda x: seen.append(target().platform) or copied(x, lambda i: i), x_of(8))
    assert seen == ["tpu"]
