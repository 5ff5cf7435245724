"""Are the GPU kernels of attention right, and how fast are they, next to cuDNN and XLA? One script for a first GPU.

    python benchmarks/gpu_attention.py [--sections NAME ...] [--rounds N] [--smoke] [--json FILE]

numerics: every kernel against float64, also for inputs of large norm: its greatest error, and that of the plain form
in the same dtype. speed: TFLOP/s of the live pairs, forward and backward (the gradient's time less the forward's),
next to `jax.nn` with cuDNN and with XLA. decode: GB/s of the cache that a step reads. step: a training step of a
dense model of 1 B parameters and of a mixture like OLMoE-1B-7B, with half its layers so that its state fits, and
their share of the GPU's peak. target: what a compiler needs to know of this GPU where there is none, as
results/target_*.txtpb. Every row is written as soon as it is there, and one that fails is a row with its error.

--smoke does all of it in a few minutes on a CPU, with small sizes and interpreted kernels: no numbers mean anything.
"""

import argparse
import contextlib
import dataclasses
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from timing import interleaved, timed, write_json
from train_step import ours

from zoo import ModelConfig
from zoo.describe import flops_per_token, peak_flops
from zoo.kernels.attention import attention
from zoo.kernels.attention.paged import decode_attention
from zoo.kernels.masks import Causal, Full, Prefix, big_bird, head_masks, longformer
from zoo.kernels.target import interpreting, target
from zoo.models.decoder import build
from zoo.models.presets import preset

RESULTS = Path(__file__).with_name("results")
OWN = {"backend": "pallas_gpu", "backward": "pallas_gpu"}
# Calls between two looks at the clock: a launch takes as long as a small kernel.
CALLS = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem of speed: B rows of T tokens, H query and K key heads, widths h and d."""

    T: int
    h: int
    d: int
    H: int
    K: int
    mask: object = Causal()
    documents: int = 0  # of equal length, in each row

    def __str__(self):
        mask = "" if self.mask == Causal() else f" {type(self.mask).__name__}"
        documents = f" {self.documents} documents" if self.documents else ""
        return f"T={self.T} H={self.H}/{self.K} D={self.h}/{self.d}{mask}{documents}"


def speed_cases(smoke):
    if smoke:
        sparse = (Case(64, 16, 16, 4, 2, Causal(16)), Case(64, 16, 16, 4, 2, documents=2))
        return [Case(64, 16, 16, 4, 4), Case(64, 24, 16, 4, 2), *sparse, Case(64, 16, 16, 2, 2, big_bird(16, 2))]
    lengths = (2048, 4096, 8192, 16384)
    causal = [Case(T, D, D, 2048 // D, 2048 // D) for D in (64, 128, 256) for T in lengths]
    return [
        *causal,
        *(Case(T, 128, 128, 32, 8) for T in lengths),
        *(Case(T, 192, 128, 16, 16) for T in (4096, 8192)),
        Case(8192, 128, 128, 16, 16, Full()),
        Case(16384, 128, 128, 32, 8, Causal(1024)),
        Case(8192, 128, 128, 32, 8, documents=8),
        Case(16384, 128, 128, 16, 16, longformer(512, 64)),
        Case(16384, 128, 128, 16, 16, big_bird(64, 16)),
    ]


# ------------------------------------------------------------------------------------- numerics


def numeric_cases(smoke):
    """Name -> (T, S, H, K, h, d), settings."""
    T, W = (48, 16) if smoke else (1024, 128)
    base = (T, T, 4, 2)
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 5, (2, T)), 1), jnp.int32)
    segments = {"q_segment_ids": ids, "kv_segment_ids": ids}
    cases = {
        "full": ((*base, W, W), {"mask": Full()}),
        "window": ((*base, W, W), {"mask": Causal(T // 8)}),
        "prefix": ((*base, W, W), {"mask": Causal() | Prefix(T // 4)}),
        "documents": ((*base, W, W), segments),
        "softcap": ((*base, W, W), {"softcap": 5.0}),
        "alibi": ((*base, W, W), {"alibi_slopes": jnp.array([0.5, 0.25, 0.125, 0.0625])}),
        "dropout": ((*base, W, W), {"dropout_rate": 0.2, "dropout_key": jax.random.key(0)}),
        "big bird": ((*base, W, W), {"mask": big_bird(16 if smoke else 64, 4)}),
        "ragged": ((T - 7, T + 5, 6, 2, W, W), {"q_offset": 12}),
    }
    widths = ((16, 16), (24, 16)) if smoke else ((64, 64), (80, 80), (128, 128), (256, 256), (192, 128), (576, 512))
    return {f"causal D={h}/{d}": ((*base, h, d), {}) for h, d in widths} | cases


def with_gradients(settings, names, d_out):
    """A jitted function of q, k, v: the output and the three gradients."""

    @jax.jit
    def run(*qkv):
        out, pull = jax.vjp(partial(attention, **({"mask": Causal()} | settings | names)), *qkv)
        return out, *pull(d_out.astype(out.dtype))

    return run


def errors(shape, settings, dtype, norm):
    """Greatest errors of our kernels and of the plain form, each over the greatest value, for out, dq, dk and dv."""
    T, S, H, K, h, d = shape
    rng = np.random.default_rng(0)
    shapes = ((2, T, H, h), (2, S, K, h), (2, S, K, d), (2, T, H, d))
    values = [np.asarray(jnp.asarray(rng.normal(size=s) * norm, dtype), np.float64) for s in shapes]
    with jax.enable_x64(True):
        exact = with_gradients(settings, {"backend": "dense", "backward": "dense"}, jnp.asarray(values[3]))
        exact = [np.asarray(x) for x in exact(*map(jnp.asarray, values[:3]))]
    found = {}
    for name, names in (("ours", OWN), ("dense", {"backend": "dense", "backward": "dense"})):
        run = with_gradients(settings, names, jnp.asarray(values[3], dtype))
        results = run(*(jnp.asarray(x, dtype) for x in values[:3]))
        found[name] = [
            float(np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max())
            for x, y in zip(results, exact, strict=True)
        ]
    return found


def numerics(smoke, rounds):
    for name, (shape, settings) in numeric_cases(smoke).items():
        for dtype in ("float32",) if smoke else ("bfloat16", "float16", "float32"):
            for norm in (1.0, 8.0):
                yield f"{name} {dtype} x{norm:g}", partial(errors, shape, settings, dtype, norm)


# ---------------------------------------------------------------------------------------- speed


def pairs(case):
    """Live pairs of a row, summed over the query heads."""
    T, found = case.T, 0.0
    keys = np.arange(T)
    masks = head_masks(case.mask)
    for mask in masks:
        for start in range(0, T, 1024):
            queries = np.arange(start, min(T, start + 1024))[:, None]
            seen = np.asarray(mask.allows(queries, keys[None, :]))
            if case.documents:
                size = T // case.documents
                seen = seen & (queries // size == keys // size)
            found += seen.sum()
    return found * case.H / len(masks)


def attends(case):
    """Name -> a function of q, k, v."""
    settings = {}
    if case.documents:
        ids = 1 + jnp.arange(case.T)[None] // (case.T // case.documents)
        settings = {"q_segment_ids": ids, "kv_segment_ids": ids}
    found = {"ours": partial(attention, mask=case.mask, **OWN, **settings)}
    if case.mask == Causal() and not case.documents and case.h == case.d:
        is_causal = {"is_causal": True}
        if target().platform == "gpu" and not target().interpret:
            found["cudnn"] = partial(attention, mask=case.mask, backend="cudnn", backward="cudnn")
        if case.T <= 4096:
            found["xla"] = partial(jax.nn.dot_product_attention, implementation="xla", **is_causal)
    return found


def clocked(run, arrays):
    """A function that gives the seconds of one of CALLS calls."""
    program = jax.jit(run).lower(*arrays).compile()

    def several():
        for _ in range(CALLS):
            results = program(*arrays)
        jax.block_until_ready(results)

    measured = timed(several)
    return lambda: measured() / CALLS


def speeds(case, rounds, tokens):
    """TFLOP/s and milliseconds of each, forward and backward."""
    B = 1 if case.documents else max(1, tokens // case.T)
    shapes = ((B, case.T, case.H, case.h), (B, case.T, case.K, case.h), (B, case.T, case.K, case.d))
    arrays = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)]
    g = jax.random.normal(jax.random.key(3), (B, case.T, case.H, case.d), jnp.bfloat16)
    runs, row = {}, {"batch": B}
    for name, attend in attends(case).items():
        try:
            runs[name] = clocked(attend, arrays)
            runs[f"{name} both"] = clocked(lambda *a, f=attend: jax.vjp(f, *a[:3])[1](a[3]), [*arrays, g])
        except Exception as error:
            row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
    medians = interleaved(runs, rounds)
    work = 2 * B * pairs(case)
    for name in attends(case):
        if f"{name} both" in medians:
            forward = medians[name]
            backward = medians[f"{name} both"] - forward
            row |= {f"{name}_forward_ms": forward * 1e3, f"{name}_backward_ms": backward * 1e3}
            row[f"{name}_forward_tflops"] = work * (case.h + case.d) / forward / 1e12
            row[f"{name}_backward_tflops"] = work * (3 * case.h + 2 * case.d) / max(backward, 1e-9) / 1e12
    return row


def speed(smoke, rounds):
    for case in speed_cases(smoke):
        yield str(case), partial(speeds, case, rounds, 64 if smoke else 16384)


# ------------------------------------------------------------------------------ decode and step


def decodes(B, H, K, width, length, rounds):
    """GB/s of keys and values that a step reads, with kernels and in plain JAX."""
    page, n = 16, length // 16
    q = jax.random.normal(jax.random.key(0), (B, H, width), jnp.bfloat16)
    k, v = (jax.random.normal(jax.random.key(i), (B * n, page, K, width), jnp.bfloat16) for i in (1, 2))
    table = jax.random.permutation(jax.random.key(3), B * n).reshape(B, n).astype(jnp.int32)
    arrays = [q, k, v, table, jnp.full(B, length, jnp.int32)]
    runs = {name: clocked(partial(decode_attention, backend=name), arrays) for name in ("paged_gpu", "gathered")}
    medians = interleaved(runs, rounds)
    read = 2 * B * length * K * width * 2
    return {
        f"{name}_{unit}": x for name, s in medians.items() for unit, x in (("ms", s * 1e3), ("gbps", read / s / 1e9))
    }


def decode(smoke, rounds):
    cases = ((2, 4, 2, 16, 64),) if smoke else ((64, 32, 8, 128, 4096), (1, 32, 8, 128, 32768), (64, 16, 16, 64, 2048))
    for B, H, K, width, length in cases:
        yield f"B={B} H={H}/{K} D={width} S={length}", partial(decodes, B, H, K, width, length, rounds)


def steps(config, rows, rounds):
    """A training step's milliseconds, tokens per second, and share of the GPU's peak."""
    seconds = interleaved({"step": ours(config, rows)}, rounds)["step"]
    tokens = rows * config.context_length
    work = tokens * flops_per_token(config, build(config).abstract_params(), config.context_length)
    row = {"step_ms": seconds * 1e3, "tokens_per_second": tokens / seconds, "tflops": work / seconds / 1e12}
    peak = peak_flops(jax.devices()[0].device_kind)
    return row | ({"mfu": work / seconds / peak} if peak else {})


def step(smoke, rounds):
    shape = {"vocab_size": 32000, "context_length": 4096, "d_model": 2048, "n_layers": 20, "n_heads": 16}
    dense = ModelConfig(**shape, n_kv_heads=8, d_ff=6144, compute_dtype="bfloat16", remat="dots")
    sparse = preset("olmoe-1b-7b", n_layers=8, remat="full")
    rows = 8
    if smoke:
        small = {"vocab_size": 64, "context_length": 32, "d_model": 32, "n_layers": 1, "n_heads": 2, "d_ff": 32}
        moe = dataclasses.replace(sparse.moe, n_experts=4, top_k=2, d_ff=32)
        dense, rows = ModelConfig(**small), 2
        sparse = dataclasses.replace(dense, moe=moe)
    yield "dense", partial(steps, dense, rows, rounds)
    yield "sparse", partial(steps, sparse, rows, rounds)


def described():
    """Writes what XLA says of this GPU to a file; on a CPU there is nothing to say."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return {"skipped": f"this is a {device.platform}"}
    from jax._src.lib import xla_client

    text = xla_client.get_topology_for_devices(jax.devices()).target_config
    file = RESULTS / f"target_{name_of(device.device_kind)}.txtpb"
    file.write_text(str(text))
    return {"file": file.name, "compute_capability": str(device.compute_capability)}


def describe_target(smoke, rounds):
    yield "target", described


def name_of(kind):
    return re.sub(r"\W+", "_", kind.lower())


SECTIONS = {"target": describe_target, "numerics": numerics, "speed": speed, "decode": decode, "step": step}


def measured(name, options):
    """The rows of a section, printed as they come."""
    for case, run in SECTIONS[name](options.smoke, options.rounds):
        try:
            row = run()
        except Exception as error:  # the next case may still tell something, and the device's time is short
            row = {"error": f"{type(error).__name__}: {error}"[:500]}
        row = {"section": name, "case": case, "device": jax.devices()[0].device_kind} | row
        print({key: round(x, 6) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small sizes, and on a CPU interpreted kernels")
    parser.add_argument("--json", metavar="FILE", help="default: results/gpu_attention_DEVICE.json, none for --smoke")
    options = parser.parse_args()
    path = options.json or (
        None if options.smoke else RESULTS / f"gpu_attention_{name_of(jax.devices()[0].device_kind)}.json"
    )
    here = target().platform == "gpu"
    if not here and not options.smoke:
        parser.error(f"this machine has no NVIDIA GPU but {target().kind!r}; --smoke tries the script on it")
    rows = []
    with contextlib.nullcontext() if here else interpreting("gpu", "NVIDIA H200"):
        for name in options.sections:
            for row in measured(name, options):
                rows.append(row)
                if path:
                    write_json(path, rows)
    if any("error" in row for row in rows):
        raise SystemExit("some cases failed; their rows have an error")


if __name__ == "__main__":
    main()
