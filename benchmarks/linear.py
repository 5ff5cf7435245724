"""How should a CPU be given its products? Two questions about a gated feed-forward network and one product.

    python benchmarks/linear.py [--rounds N] [--json FILE]

Forward and backward of the network: one flat product ("ours") or one with more dimensions. In bfloat16, both
gradients of a product: with the factors turned first ("ours") or multiplied as they lie.
"""

import argparse

import jax
import jax.numpy as jnp
from timing import interleaved, row, table, timed, write_json

from zoo.kernels.linear import linear, product, wide_product

SHAPES = {"quickstart": (16, 256, 256, 512), "wide": (8, 256, 384, 1024)}  # B, T, D, F


def network(product, shape):
    """The timed gradient of the network for all its inputs, made with `product(x, w)`."""
    B, T, D, F = shape
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = ((B, T, D), (D, F), (D, F), (F, D))
    args = [jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True)]

    def loss(x, gate, up, down):
        return jnp.sum(product(jax.nn.silu(product(x, gate)) * product(x, up), down))

    return run(jax.grad(loss, argnums=(0, 1, 2, 3)), args)


def gradients(product, shape):
    """The timed gradients of a bfloat16 product."""
    B, T, D, F = shape
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = ((B * T, D), (D, F), (B * T, F))
    args = [jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)]
    return run(lambda x, w, g: jax.vjp(product, x, w)[1](g), args)


def run(f, args):
    f = jax.jit(f)
    return timed(lambda: jax.block_until_ready(f(*args)))


def as_they_lie(x, w):
    return wide_product(x, w).astype(x.dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = []
    for name, shape in SHAPES.items():
        flat = {"flat": network(linear, shape), "three dimensions": network(lambda x, w: x @ w, shape)}
        turned = {"turned": gradients(product, shape), "as they lie": gradients(as_they_lie, shape)}
        for runs in (flat, turned):
            (ours, seconds), *peers = interleaved(runs, options.rounds).items()
            rows.append(row(f"{name}, {ours}", seconds, dict(peers)))
    print(table(rows))
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
