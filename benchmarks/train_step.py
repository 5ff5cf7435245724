"""How long does a training step take, next to the same model in torch and transformers?

    python benchmarks/train_step.py [--peer-python PATH] [--rounds N] [--json FILE]

Forward, backward, clipping and AdamW in float32 on random tokens. PATH is an interpreter that has torch and
transformers; both programs stay in memory and step in turns.
"""

import argparse
import json
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
from timing import interleaved, table, timed, write_json

from zoo import Experiment, MeshConfig, ModelConfig, OptimizerConfig, SparseConfig, TrainConfig, build
from zoo.data.loader import Batch
from zoo.parallel.mesh import make_mesh
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


def ours(config, rows):
    """A function that takes one step and waits for it."""
    optimizer_config = OptimizerConfig(warmup_steps=1)
    experiment = Experiment("benchmark", config, optimizer=optimizer_config, train=TrainConfig(batch_size=rows))
    model = build(config)
    specs = model.abstract_params()
    optimizer = make_optimizer(optimizer_config, specs)
    layout = make_layout(specs, optimizer, make_mesh(MeshConfig(), jax.devices()[:1]), 1)
    step = make_train_step(model, experiment, optimizer, layout)
    state = [fresh_state(model, optimizer, layout, 0)]
    tokens = jax.random.randint(jax.random.key(0), (rows, config.context_length), 0, config.vocab_size, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    batch = Batch(tokens, jnp.roll(tokens, -1, 1), positions, jnp.ones_like(tokens))

    def run():
        state[0], metrics = step(state[0], batch)
        jax.block_until_ready(metrics)

    return timed(run)


class Peer:
    """The same model in another interpreter, which steps when it is told to and answers with its seconds."""

    def __init__(self, python, config, rows):
        program = Path(__file__).with_name("torch_step.py")
        self.process = subprocess.Popen([python, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        moe = config.moe and {"n_experts": config.moe.n_experts, "top_k": config.moe.top_k, "d_ff": config.moe.d_ff}
        names = ("vocab_size", "context_length", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff")
        self._ask(json.dumps({name: getattr(config, name) for name in names} | {"moe": moe, "rows": rows}))

    def _ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def __call__(self):
        return float(self._ask("step"))

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter with torch and transformers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = []
    for name, (config, batch_rows) in CASES.items():
        peers = {"torch": Peer(options.peer_python, config, batch_rows)} if options.peer_python else {}
        medians = interleaved({"zoo": ours(config, batch_rows)} | peers, options.rounds)
        rows.append({"case": name} | {column: seconds * 1e3 for column, seconds in medians.items()})
        for peer in peers.values():
            peer.close()
    print(table(rows, list(medians)))
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
