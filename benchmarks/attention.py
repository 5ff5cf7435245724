"""How long does attention take on a CPU, next to plain JAX, jax.nn and torch, and does it follow the live blocks?

    python benchmarks/attention.py [--peer-python PATH] [--rounds N] [--json FILE]

B=1, H=8, D=64, forward alone and with the gradients of q, k and v. PATH is an interpreter that has torch; all programs
stay in memory and run in turns. The second table holds sparse masks against the dense causal one: their time as a
multiple of (share of live pairs) x (time of the causal mask at that length), and temporary memory.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from timing import Peer, interleaved, row, table, timed, write_json

from zoo.kernels.attention import attention
from zoo.kernels.masks import Causal, big_bird, dense, head_masks, longformer

B, H, D = 1, 8, 64
# name: (mask, length, dtype)
CASES = {
    "causal 2048": (Causal(), 2048, "float32"),
    "causal 2048, bfloat16": (Causal(), 2048, "bfloat16"),
    "causal 8192": (Causal(), 8192, "float32"),
    "causal 8192, bfloat16": (Causal(), 8192, "bfloat16"),
    "window 512, 8192": (Causal(512), 8192, "float32"),
    "longformer 512, 8192": (longformer(512, 64), 8192, "float32"),
    "big bird 64, 8192": (big_bird(64, H), 8192, "float32"),
}
# From this length on, whoever stores every score would need gigabytes for the gradients of 8 heads.
LONG = 8192


def naive(q, k, v, mask):
    """What a textbook has."""
    scores = jnp.einsum("BTHh,BSHh->BHTS", q, k, preferred_element_type=jnp.float32) * D**-0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(q.dtype)
    return jnp.einsum("BHTS,BSHh->BTHh", weights, v)


def with_gradients(attend):
    """A function of q, k, v that gives the output and the gradients of all three."""

    def run(q, k, v):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(out)

    return run


def compiled(attend, arrays, gradients):
    run = jax.jit(with_gradients(attend) if gradients else attend)
    return run.lower(*arrays).compile()


def pairs_of(mask, length):
    """The mask as bools [heads or 1, T, T]."""
    return np.stack([dense(own, length, length) for own in head_masks(mask)])


def whole_mask(mask, length):
    """The mask for those who want one: [heads or 1, T, T]."""
    pairs = pairs_of(mask, length)
    return pairs if len(pairs) in (1, H) else np.repeat(pairs, H // len(pairs), axis=0)


def peers_of(case, gradients, options, folder):
    """Name -> a program to run in turns; those that would need too much memory are left out."""
    mask, length, dtype = CASES[case]
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, (B, length, H, D), dtype) for key in keys]
    runs = {}
    is_causal = mask == Causal()
    if length < LONG:
        whole = jnp.asarray(whole_mask(mask, length))
        runs["naive"] = partial(naive, mask=whole)
    if length < LONG or not gradients:
        extra = {"is_causal": True} if is_causal else {"mask": jnp.asarray(whole_mask(mask, length))[None]}
        runs["jax.nn"] = partial(jax.nn.dot_product_attention, **extra)
    peers = {}
    for name, attend in runs.items():
        program = compiled(attend, arrays, gradients)
        peers[name] = timed(lambda program=program: jax.block_until_ready(program(*arrays)))
    if options.peer_python:
        path = "" if is_causal else str(Path(folder) / "mask.npy")
        if path:
            np.save(path, whole_mask(mask, length))
        settings = {"B": B, "H": H, "T": length, "D": D, "dtype": dtype, "gradients": gradients, "mask": path}
        peers["torch"] = Peer(options.peer_python, "torch_attention.py", settings)
    own = compiled(partial(attention, mask=mask), arrays, gradients)
    return timed(lambda: jax.block_until_ready(own(*arrays))), peers, own.memory_analysis().temp_size_in_bytes


def measure(case, gradients, options, folder):
    """A row of the table."""
    own, peers, temp = peers_of(case, gradients, options, folder)
    medians = interleaved({"ours": own} | peers, options.rounds)
    if "torch" in peers:
        peers["torch"].close()
    name = f"{case}{', gradients' if gradients else ''}"
    return row(name, medians.pop("ours"), medians) | {"temp_mb": temp / 1e6}


def against_dense(options):
    """Rows of the second table: masks in turns with the causal one at the same length."""
    rows = []
    for gradients in (False, True):
        programs, shares, temps = {}, {}, {}
        keys = jax.random.split(jax.random.key(0), 3)
        for case, (mask, length, dtype) in CASES.items():
            if length < LONG or dtype != "float32":
                continue
            arrays = [jax.random.normal(key, (B, length, H, D), dtype) for key in keys]
            program = compiled(partial(attention, mask=mask), arrays, gradients)
            programs[case] = timed(lambda program=program, arrays=arrays: jax.block_until_ready(program(*arrays)))
            shares[case], temps[case] = pairs_of(mask, length).mean(), program.memory_analysis().temp_size_in_bytes
        medians = interleaved(programs, options.rounds)
        causal = medians["causal 8192"] / shares["causal 8192"]
        for case, seconds in medians.items():
            name = f"{case}{', gradients' if gradients else ''}"
            found = {"case": name, "ours_ms": seconds * 1e3, "live_share": float(shares[case])}
            rows.append(found | {"of_dense_share": seconds / (causal * shares[case]), "temp_mb": temps[case] / 1e6})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter with torch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(case, gradients, options, folder) for case in CASES for gradients in (False, True)]
    print(table(rows))
    sparse = against_dense(options)
    print(f"\n{'against the causal mask':44}{'ours':>12}{'live':>8}{'time / (live x dense)':>24}{'temp':>10}")
    for found in sparse:
        times = f"{found['ours_ms']:9.1f} ms{found['live_share']:8.3f}{found['of_dense_share']:24.2f}"
        print(f"{found['case']:44}{times}{found['temp_mb']:7.0f} MB")
    if options.json:
        write_json(options.json, rows + sparse)


if __name__ == "__main__":
    main()
