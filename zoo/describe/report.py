"""What a model costs, as one record: for the screen with the formula beside each number, and as JSON."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from zoo.config import ConfigError, MeshConfig, ModelConfig, SoftConfig
from zoo.describe.flops import decoding_flops, forward_flops, merging_flops, recomputed_flops
from zoo.describe.memory import (
    ACTIVATIONS,
    MOMENTS,
    TrainingState,
    device_memory,
    itemsize,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    training_state,
)
from zoo.describe.parameters import Parameters, count_parameters, count_parts
from zoo.describe.question import Question
from zoo.models.decoder import build

PF_DAY = 1e15 * 86_400


class Row(NamedTuple):
    """One number: what it is, the number as text, and how it comes about."""

    name: str
    value: str
    formula: str


class Description(NamedTuple):
    """What a model costs.

    Attributes:
        name: of the model.
        values: the numbers, as JSON has them.
        tables: heading -> rows for the screen.
    """

    name: str
    values: dict[str, Any]
    tables: dict[str, list[Row]]

    def __str__(self) -> str:
        rows = [row for table in self.tables.values() for row in table]
        wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
        lines = [self.name]
        for heading, table in self.tables.items():
            lines += ["", heading]
            lines += [f"  {row.name:<{wide[0]}}  {row.value:>{wide[1]}}  {row.formula}".rstrip() for row in table]
        return "\n".join(lines)


def describe(config: ModelConfig, name: str, question: Question) -> Description:
    """What a model costs, from abstract arrays alone: not a weight is allocated.

    Raises:
        ConfigError: the sequence is longer than the model's context, the model has no vocabulary size, or the mesh does
            not divide it.
    """
    if question.length > config.context_length:
        raise ConfigError(f"length={question.length} is more than model.context_length={config.context_length}")
    specs = build(config).abstract_params()
    count, parts = count_parameters(config, specs), count_parts(config, specs)
    forward = forward_flops(config, question.length, specs)
    sections = (
        _parameters(count, parts),
        _flops(config, Counts(count, parts), forward, question),
        _memory(config, specs, question),
        _cache(config, count, forward, question),
        _training(count, forward, question),
    )
    values: dict[str, Any] = {"name": name}
    tables = {}
    for heading, rows, numbers in sections:
        values |= numbers
        if rows:
            tables[heading] = rows
    return Description(name, values, tables)


class Counts(NamedTuple):
    """The parameters of the whole model and of its parts."""

    whole: Parameters
    parts: dict[str, Parameters]


Section = tuple[str, list[Row], dict[str, Any]]


# How a part's parameters come about, without its biases; n is 3 for a GLU and 2 otherwise.
FORMULAS = {
    "token embedding": "V D",
    "position table": "rows D",
    "norms": "D or h each",
    "attention queries": "L D H h",
    "attention keys": "L D K h",
    "attention values": "L D K h",
    "attention output": "L H h D",
    "attention sinks": "L H",
    "router": "D E a mixture",
    "shared experts": "n D F a mixture, F of all together",
    "experts": "E n D F a mixture",
    "feed-forward": "n D F a layer",
    "head": "D V",
}


def _parameters(count: Parameters, parts: dict[str, Parameters]) -> Section:
    outside = count.active - parts["token embedding"].total
    rows = [
        Row(part, f"{p.total:,}", FORMULAS[part] + f"; {p.active:,} active" * (p.active != p.total))
        for part, p in parts.items()
    ]
    sparse = count.active != count.total
    rows += [
        Row("total", f"{count.total:,}", "N, the sum"),
        Row(
            "active", f"{count.active:,}", "N, with the share of the experts that a token uses" if sparse else "= total"
        ),
        Row("active without embedding", f"{outside:,}", "active - V D, the table of the input"),
    ]
    each = {part: {"total": p.total, "active": p.active} for part, p in parts.items()}
    numbers = {"total": count.total, "active": count.active, "active_without_embedding": outside, "parts": each}
    return "Parameters", rows, {"parameters": numbers}


def _flops(config: ModelConfig, counts: Counts, forward: float, question: Question) -> Section:
    whole, parts = counts
    length = question.length
    merging, again = merging_flops(config, length), recomputed_flops(config, parts, forward, length)
    seen = f"every product, traced, at {length:,} tokens a sequence; masks by their live share"
    rows = [Row("forward", _si(forward), seen)]
    if merging:
        rows.append(Row("of it, merging", _si(merging), "2 E n D F for each segment of a sequence"))
    rows += [
        Row("training", _si(3 * forward), "3 forward: each product has two more in its gradient"),
        Row("6 N", _si(6 * whole.products), "6 x active parameters in products; without attention's scores"),
    ]
    if again:
        rows.append(Row("computed again", _si(again), f"on top, at most, by remat={config.remat!r}"))
    values = {"forward": forward, "training": 3 * forward, "six_n": 6.0 * whole.products}
    values |= {"merging": merging, "recomputed": again, "length": length}
    return "FLOPs per token", rows, {"flops_per_token": values}


def _memory(config: ModelConfig, specs: Any, question: Question) -> Section:
    n, tokens = question.n_devices, question.length * question.batch_size
    rows, values = [], {}
    state = training_state(specs, question.optimizer, question.ema)
    for zero in range(4):
        row, values[f"zero_{zero}"] = _state_row(
            f"ZeRO {zero}, state of 1 of {n}", state.split(zero, n), _state_formula(config, question, zero)
        )
        rows.append(row)
    kept = device_memory(config, specs, question)
    if question.mesh is not None:
        row, values["mesh"] = _state_row(f"on this mesh, ZeRO {question.mesh.zero}", kept.state, _mesh(question.mesh))
        rows.append(row)
    formula = ACTIVATIONS[config.remat] + " + merged experts" * isinstance(config.moe, SoftConfig)
    rows += [
        Row("activations", _bytes(kept.activations), f"estimate: {tokens:,} tokens x ({formula})"),
        Row("logits", _bytes(kept.logits), f"in chunks; whole they were {_bytes(kept.logits_whole)} = 4 tokens V"),
    ]
    values |= {"activations": kept.activations, "logits": kept.logits, "logits_whole": kept.logits_whole}
    return f"Memory for training, {question.optimizer}", rows, {"memory_bytes": values}


def _state_row(name: str, state: TrainingState, formula: str) -> tuple[Row, dict[str, float]]:
    parts = ", ".join(f"{part} {_bytes(size)}" for part, size in state._asdict().items())
    return Row(name, _bytes(state.total), f"{formula}: {parts}"), state._asdict() | {"total": state.total}


def _mesh(mesh: MeshConfig) -> str:
    sizes = [f"{axis} {size}" for axis in mesh.axes if (size := getattr(mesh, axis)) > 1]
    return " x ".join(sizes) or "one device"


def _state_formula(config: ModelConfig, question: Question, zero: int) -> str:
    """Bytes of weights, gradients and moments; what ZeRO splits is divided by the devices."""
    moments = MOMENTS[question.optimizer]
    if question.ema:
        moments = f"({moments} + 4 N of the mean)"
    terms = f"{itemsize(config.param_dtype)} N", "4 N", moments
    split = (zero >= 3, zero >= 2, zero >= 1)
    return " + ".join(term + f" / {question.n_devices}" * s for term, s in zip(terms, split, strict=True))


def _cache(config: ModelConfig, count: Parameters, forward: float, question: Question) -> Section:
    size, length = itemsize(config.compute_dtype), question.length
    per_token, sequence = kv_bytes_per_token(config), kv_bytes_per_sequence(config, length)
    read = count.products * size + sequence
    decode = decoding_flops(config, forward, length) / read
    prefill = forward * length / (count.total * size + sequence)
    rows = [
        Row("KV cache per token", _bytes(per_token), f"2 K h L x {size} bytes"),
        Row("KV cache per sequence", _bytes(sequence), f"{length:,} tokens, a window no more than its width"),
        Row(
            "intensity of decoding", f"{decode:.2f} FLOP/B", "FLOPs of the last token / bytes of active matrices, cache"
        ),
        Row("intensity of a prompt", f"{prefill:,.0f} FLOP/B", "FLOPs of a sequence / bytes of all weights and cache"),
    ]
    values: dict[str, Any] = {
        "kv_cache_bytes_per_token": per_token,
        "kv_cache_bytes_per_sequence": sequence,
        "arithmetic_intensity": {"decode": decode, "prefill": prefill},
    }
    if question.device is not None:
        rate = question.device.bandwidth / read
        balance = question.device.flops / question.device.bandwidth
        rows += [
            Row("decoding at best", f"{rate:,.0f} tokens/s", "memory bandwidth / bytes read, one sequence"),
            Row("device's balance", f"{balance:,.0f} FLOP/B", "peak / bandwidth: below it, memory is the limit"),
        ]
        values["arithmetic_intensity"] |= {"device": balance, "decode_tokens_per_second": rate}
    return "Generating", rows, values


def _training(count: Parameters, forward: float, question: Question) -> Section:
    if question.tokens is None:
        return "Training", [], {}
    totals = {"traced": 3 * forward * question.tokens, "6 N D": 6.0 * count.products * question.tokens}
    rows = [Row("tokens", _si(question.tokens), "")]
    values: dict[str, Any] = {"tokens": question.tokens}
    for name, total in totals.items():
        key = "" if name == "traced" else "_6nd"
        rows.append(Row(f"FLOPs, {name}", f"{total:.3g}", f"= {total / PF_DAY:,.0f} PF-days"))
        values |= {f"flops{key}": total, f"pf_days{key}": total / PF_DAY}
        if question.device is not None:
            days = total / (question.n_devices * question.device.flops * question.mfu) / 86_400
            peak = f"{_si(question.device.flops)}FLOP/s"
            how = f"FLOPs / ({question.n_devices:,} devices x peak {peak} x MFU {question.mfu:.0%})"
            rows.append(Row(f"days, {name}", f"{days:,.1f}", how))
            values[f"days{key}"] = days
    return "Training", rows, {"training": values}


def _si(value: float) -> str:
    """Three digits and a letter."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g} "


def _bytes(value: float) -> str:
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f} B"


def markdown(columns: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
