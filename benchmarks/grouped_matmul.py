"""How fast do the experts of a sparse mixture run, next to ways that drop, waste or bound the work?

    python benchmarks/grouped_matmul.py [--json FILE] [--rounds 9] [--only WORD ...]

Each case is E experts (a SwiGLU of width F on D), k of them a token, N = k T assignments with the uneven loads
of a real router. Candidates run one after the other within a round, so that a busy machine slows all of them;
the table gives medians in ms and the median ratio to `grouped_ffn` of the same round. "one ffn" is the floor:
all N rows through one expert. "capacity" computes without loss only while no expert gets more than its equal
share times the factor. "by NAME" is `grouped_ffn` with that backend: on an accelerator, what "auto" should take.
"""

import argparse
import json
import statistics
import time
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from zoo.kernels import grouped_matmul as kernel
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_backends import target_platform

# name: (tokens T, experts E, experts per token k, width D, expert width F)
CASES = {
    "quickstart": (4096, 8, 2, 256, 256),
    "wide experts": (4096, 8, 2, 256, 512),
    "many experts": (2048, 64, 8, 256, 128),
    "decoding": (8, 8, 2, 256, 256),
}
silu = jax.nn.silu


def inputs(n_tokens, n_experts, top_k, width, d_ff):
    """Sorted rows, their scales, the three matrices and the counts."""
    draw, n_rows = np.random.default_rng(0), n_tokens * top_k
    normal = lambda *shape: jnp.asarray(draw.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)  # noqa: E731
    counts = draw.multinomial(n_rows, draw.dirichlet(np.full(n_experts, 8.0)))
    x, scale = normal(n_rows, width), jnp.asarray(draw.uniform(size=(n_rows, 1)), jnp.float32)
    gate, up, down = normal(n_experts, width, d_ff), normal(n_experts, width, d_ff), normal(n_experts, d_ff, width)
    return x, scale, gate, up, down, jnp.asarray(counts, jnp.int32)


def one_ffn(x, scale, gate, up, down, counts):
    del counts
    return (silu(x @ gate[0]) * (x @ up[0]) * scale) @ down[0]


def three_products(x, scale, gate, up, down, counts):
    product = partial(kernel.grouped_matmul, counts=counts)
    return product(silu(product(x, gate)) * product(x, up) * scale, down)


def in_blocks(rows, f):
    """f, traced with blocks of `rows` rows."""

    def run(*args):
        with mock.patch.object(kernel, "block_rows", lambda n_rows, n_groups: min(rows, n_rows)):
            return f(*args)

    return run


def capacity(factor, x, scale, gate, up, down, counts):
    """Every expert computes `factor` times its equal share, padding or not."""
    n_experts, places = counts.shape[0], -(-int(x.shape[0] * factor) // counts.shape[0])
    row = (jnp.cumsum(counts) - counts)[:, None] + jnp.arange(places)
    real = (jnp.arange(places) < counts[:, None])[..., None]
    gather = lambda a: jnp.where(real, a[jnp.minimum(row, x.shape[0] - 1)], 0)  # noqa: E731
    own = gather(x)
    hidden = silu(jnp.einsum("ECD,EDF->ECF", own, gate)) * jnp.einsum("ECD,EDF->ECF", own, up) * gather(scale)
    return jnp.einsum("ECF,EFD->ECD", hidden, down).reshape(n_experts * places, -1)


def dense(top_k, x, scale, gate, up, down, counts):
    """All tokens through all experts."""
    del counts
    x, scale = x[::top_k], scale[::top_k]
    hidden = silu(jnp.einsum("TD,EDF->TEF", x, gate)) * jnp.einsum("TD,EDF->TEF", x, up) * scale[..., None]
    return jnp.einsum("TEF,EFD->TD", hidden, down)


def fused(x, scale, gate, up, down, counts, backend="auto"):
    return kernel.grouped_ffn(x, scale, kernel.FFNParams(gate, up, down), counts, HiddenUnits("silu"), backend)


def candidates(top_k, only):
    """name: (function, transform of the program that calls it)."""
    plain = {
        "grouped_ffn": fused,
        "one ffn": one_ffn,
        "three grouped_matmul": three_products,
        "capacity 1.25": partial(capacity, 1.25),
        "capacity 2": partial(capacity, 2.0),
        "dense": partial(dense, top_k),
    }
    backends = ["sweep", "ragged_dot"] + ["triton"] * (target_platform() == "cuda")
    plain |= {f"by {backend}": partial(fused, backend=backend) for backend in backends}
    named = {name: (f, lambda program: program) for name, f in plain.items()}
    named |= {f"blocks of {rows}": (fused, partial(in_blocks, rows)) for rows in (32, 64, 128, 256, 512)}
    return {n: c for n, c in named.items() if not only or n == "grouped_ffn" or any(word in n for word in only)}


def gradient(f):
    return jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), argnums=(0, 1, 2, 3, 4))


def measure(functions, args, rounds):
    """(median seconds, median ratio to grouped_ffn in the same round) of each, run in turns."""
    for f in functions.values():
        jax.block_until_ready(f(*args))
    seconds = {name: [] for name in functions}
    for _ in range(rounds):
        for name, f in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(f(*args))
            seconds[name].append(time.perf_counter() - start)
    own = seconds["grouped_ffn"]
    ratios = {name: [t / base for t, base in zip(times, own, strict=True)] for name, times in seconds.items()}
    return {name: (statistics.median(seconds[name]), statistics.median(ratios[name])) for name in seconds}


def run_case(name, case, rounds, only):
    """Prints one table; returns its rows."""
    args, chosen = inputs(*case), candidates(case[2], only)
    forward = measure({n: jax.jit(wrap(f)) for n, (f, wrap) in chosen.items()}, args, rounds)
    both = measure({n: jax.jit(wrap(gradient(f))) for n, (f, wrap) in chosen.items()}, args, rounds)
    sizes = " ".join(f"{letter}={size}" for letter, size in zip("TEkDF", case, strict=True))
    print(f"\n{name}: {sizes}, float32, {jax.devices()[0].device_kind}")
    print(f"{'':22}{'forward':>9}{'ratio':>7}{'with gradients':>16}{'ratio':>7}")
    rows = []
    for n in chosen:
        (alone, alone_ratio), (full, full_ratio) = forward[n], both[n]
        print(f"{n:22}{alone * 1e3:9.2f}{alone_ratio:7.2f}{full * 1e3:16.2f}{full_ratio:7.2f}")
        times = {"forward_s": alone, "forward_ratio": alone_ratio, "gradient_s": full, "gradient_ratio": full_ratio}
        rows.append({"case": name, "candidate": n, **times})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers there too")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each candidate")
    parser.add_argument("--only", nargs="*", default=[], help="candidates whose name contains one of these words")
    options = parser.parse_args()
    rows = [row for name, case in CASES.items() for row in run_case(name, case, options.rounds, options.only)]
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
