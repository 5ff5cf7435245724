"""What do the mixtures cost next to a plain network at equal active parameters, and what does length cost?

    python benchmarks/mixtures.py [--lengths 512 2048 8192] [--rounds N] [--json FILE]

A training step of every kind of network: its time, and the temporary memory and all memory of the compiled step.
With lengths, the same of the plain network on one row of so many tokens: what is quadratic shows there.
"""

import argparse
import dataclasses

from timing import interleaved, write_json
from train_step import BASE, compiled, stepping

from zoo import DenseConfig, ModelConfig, SoftConfig, SparseConfig, build
from zoo.describe import count_parameters
from zoo.train.memory import keep_freed_memory

ROWS = 8
# A token meets 1,024 hidden units in each: those of two experts, of all four, of one merged expert.
MIXTURES = {
    "plain": {"d_ff": 1024},
    "sparse": {"moe": SparseConfig(n_experts=8, top_k=2, d_ff=512)},
    "dense": {"moe": DenseConfig(n_experts=4, d_ff=256)},
    "soft": {"moe": SoftConfig(n_experts=8, d_ff=1024, segment_length=64, max_documents=1)},
}


def prepared(config, rows):
    """What `measured` asks of a model: its parameters, the memory of its compiled step, and the step."""
    step, state, batch = compiled(config, rows)
    memory, count = step.memory_analysis(), count_parameters(config, build(config).abstract_params())
    temporary = memory.temp_size_in_bytes
    whole = temporary + memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = {"total_parameters": count.total, "active_parameters": count.active}
    return sizes | {"temporary_mb": temporary / 1e6, "memory_mb": whole / 1e6}, stepping(step, state, batch)


def measured(models, rounds):
    """Rows of {name: (config, rows)}, stepping in turns."""
    found = {name: prepared(*model) for name, model in models.items()}
    medians = interleaved({name: step for name, (_, step) in found.items()}, rounds)
    return [{"case": name, "step_ms": medians[name] * 1e3} | numbers for name, (numbers, _) in found.items()]


def table(rows):
    """Rows as text, times also as multiples of the first."""
    head = f"{'case':16}{'parameters':>12}{'active':>10}{'step':>22}{'temporary':>12}{'memory':>10}"
    lines = [head]
    for row in rows:
        counts = f"{row['total_parameters'] / 1e6:10.1f} M{row['active_parameters'] / 1e6:8.1f} M"
        time = f"{row['step_ms']:.1f} ms ({row['step_ms'] / rows[0]['step_ms']:.2f}x)"
        lines.append(f"{row['case']:16}{counts}{time:>22}{row['temporary_mb']:9.0f} MB{row['memory_mb']:7.0f} MB")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[], help="tokens of a row, for a table of lengths")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    keep_freed_memory()
    base = ModelConfig(**BASE, unroll=True)
    rows = measured(
        {name: (dataclasses.replace(base, **parts), ROWS) for name, parts in MIXTURES.items()}, options.rounds
    )
    print(table(rows))
    for length in options.lengths:  # one by one: they would not fit beside each other
        config = dataclasses.replace(base, **MIXTURES["plain"], context_length=length)
        rows += measured({f"{length} tokens": (config, 1)}, options.rounds)
    if options.lengths:
        print(table(rows[len(MIXTURES) :]))
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
