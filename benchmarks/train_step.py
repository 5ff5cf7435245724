"""How long does a training step take, next to the same model in torch and transformers?

    python benchmarks/train_step.py [--peer-python PATH] [--rounds N] [--only WORD ...] [--json FILE]

Forward, backward, clipping and AdamW on random tokens, parameters in float32 and products in float32 or bfloat16.
PATH is an interpreter that has torch and transformers: Llama and Mixtral, in float32 and under bfloat16 autocast,
eager and compiled, which takes a C++ compiler. All programs stay in memory and step in turns.
"""

import argparse
import dataclasses
import sys

import jax
import jax.numpy as jnp
from timing import Peer, interleaved, row, table, timed, write_json

from zoo import Experiment, MeshConfig, ModelConfig, OptimizerConfig, SparseConfig, TrainConfig, build
from zoo.data.loader import Batch
from zoo.parallel.mesh import make_mesh
from zoo.train.memory import keep_freed_memory
from zoo.train.optimizer import make_optimizer
from zoo.train.state import fresh_state, make_layout
from zoo.train.step import make_train_step

QUICKSTART = {"vocab_size": 2048, "context_length": 256, "d_model": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2}
BASE = {"vocab_size": 4096, "context_length": 256, "d_model": 384, "n_layers": 6, "n_heads": 6, "n_kv_heads": 2}
# name: (model, rows of a batch)
CASES = {
    "quickstart, sparse": (ModelConfig(**QUICKSTART, moe=SparseConfig(d_ff=256), unroll=True), 16),
    "quickstart, dense": (ModelConfig(**QUICKSTART, d_ff=512, unroll=True), 16),
    "6 layers, sparse": (ModelConfig(**BASE, moe=SparseConfig(d_ff=512), unroll=True), 8),
    "6 layers, dense": (ModelConfig(**BASE, d_ff=1024, unroll=True), 8),
}
PRECISIONS = ("float32", "bfloat16")


def compiled(config, rows):
    """The compiled step of a model, its first state and a batch of random tokens, on one device."""
    optimizer_config = OptimizerConfig(warmup_steps=1)
    experiment = Experiment("benchmark", config, optimizer=optimizer_config, train=TrainConfig(batch_size=rows))
    model = build(config)
    specs = model.abstract_params()
    optimizer = make_optimizer(optimizer_config, specs)
    layout = make_layout(specs, optimizer, make_mesh(MeshConfig(), jax.devices()[:1]), 1)
    state = fresh_state(model, optimizer, layout, 0)
    tokens = jax.random.randint(jax.random.key(0), (rows, config.context_length), 0, config.vocab_size, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    batch = Batch(tokens, jnp.roll(tokens, -1, 1), positions, jnp.ones_like(tokens))
    return make_train_step(model, experiment, optimizer, layout).lower(state, batch).compile(), state, batch


def stepping(step, state, batch):
    """A function that takes one step, waits for it and returns its seconds."""
    state = [state]

    def run():
        state[0], metrics = step(state[0], batch)
        jax.block_until_ready(metrics)

    return timed(run)


def ours(config, rows):
    """`stepping` of a model."""
    return stepping(*compiled(config, rows))


def settings_of(config, rows, precision, is_compiled):
    """What torch_step.py asks for."""
    moe = config.moe and {"n_experts": config.moe.n_experts, "top_k": config.moe.top_k, "d_ff": config.moe.d_ff}
    names = ("vocab_size", "context_length", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff")
    variant = {"moe": moe, "rows": rows, "bfloat16": precision == "bfloat16", "compiled": is_compiled}
    return {name: getattr(config, name) for name in names} | variant


def peers_of(python, config, rows):
    """name: peer, of those that run."""
    found = {}
    for precision in PRECISIONS:
        for how in ("eager", "compiled"):
            peer = Peer(python, "torch_step.py", settings_of(config, rows, precision, how == "compiled"))
            if "error" in peer.versions:
                print(f"torch {precision} {how}: {peer.versions['error']}", file=sys.stderr)
                peer.close()
            else:
                found[f"torch {precision} {how}"] = peer
    return found


def run_case(name, python, rounds):
    """The rows of a case, one for each precision of ours with the same peers; and the versions of the peers."""
    config, batch_rows = CASES[name]
    own = {p: ours(dataclasses.replace(config, compute_dtype=p), batch_rows) for p in PRECISIONS}
    peers = peers_of(python, config, batch_rows) if python else {}
    medians = interleaved(own | peers, rounds)
    versions = {}
    for peer in peers.values():
        versions = peer.versions
        peer.close()
    others = {peer: medians[peer] for peer in peers}
    return [
        row(f"{name}, {p}", medians[p], {f"ours {q}": medians[q] for q in own if q != p} | others) for p in own
    ], versions


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter with torch and transformers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name contains one of these words")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    keep_freed_memory()
    rows, versions = [], {}
    for name in CASES:
        if any(word in name for word in options.only):
            new, versions = run_case(name, options.peer_python, options.rounds)
            rows += new
    print(table(rows))
    if options.json:
        write_json(options.json, rows, versions)


if __name__ == "__main__":
    main()
