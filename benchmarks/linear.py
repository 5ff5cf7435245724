"""Does one flat product beat a product with more dimensions? Forward and backward of a gated feed-forward network.

python benchmarks/linear.py [--rounds N] [--json FILE]
"""

import argparse

import jax
import jax.numpy as jnp
from timing import interleaved, table, timed, write_json

from zoo.kernels.linear import linear

SHAPES = {"quickstart": (16, 256, 256, 512), "wide": (8, 256, 384, 1024)}  # B, T, D, F


def program(product, shape):
    """The jitted gradient of the network for all its inputs, made with `product(x, w)`."""
    B, T, D, F = shape
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = ((B, T, D), (D, F), (D, F), (F, D))
    args = [jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True)]

    def loss(x, gate, up, down):
        return jnp.sum(product(jax.nn.silu(product(x, gate)) * product(x, up), down))

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    return timed(lambda: jax.block_until_ready(run(*args)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = []
    for name, shape in SHAPES.items():
        runs = {"flat": program(linear, shape), "three dimensions": program(lambda x, w: x @ w, shape)}
        medians = interleaved(runs, options.rounds)
        rows.append({"case": name} | {column: seconds * 1e3 for column, seconds in medians.items()})
    print(table(rows, list(runs)))
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
