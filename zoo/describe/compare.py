"""Two models side by side: what differs, and what it costs."""

from typing import Any, NamedTuple

from zoo.config import Block, ModelConfig, flat, to_dict
from zoo.describe.report import Description, Question, describe


class Comparison(NamedTuple):
    """Two models.

    Attributes:
        names: of both.
        differences: field -> its two values, where they differ; None where a model lacks the field.
        costs: what -> its two numbers.
    """

    names: tuple[str, str]
    differences: dict[str, tuple[Any, Any]]
    costs: dict[str, tuple[float, float]]

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain values."""
        return {
            "names": list(self.names),
            "differences": {name: list(pair) for name, pair in self.differences.items()},
            "costs": {name: list(pair) for name, pair in self.costs.items()},
        }

    def __str__(self) -> str:
        cells = [("", *self.names, "")]
        # Of what only one of them has, a screen shows what is switched on.
        shown = {name: pair for name, pair in self.differences.items() if pair[0] or pair[1]}
        cells += [(name, *map(str, pair), "") for name, pair in shown.items()]
        if not self.differences:
            cells.append(("no field differs", "", "", ""))
        cells.append(("", "", "", ""))
        for name, (one, other) in self.costs.items():
            cells.append((name, f"{one:,.0f}", f"{other:,.0f}", f"x {other / one:.3g}" if one else ""))
        wide = [max(len(row[i]) for row in cells) for i in range(3)]
        lines = (f"{n:<{wide[0]}}  {a:>{wide[1]}}  {b:>{wide[2]}}  {ratio}".rstrip() for n, a, b, ratio in cells)
        return "\n".join(lines)


def compare(one: tuple[str, ModelConfig], other: tuple[str, ModelConfig]) -> Comparison:
    """Compares two models, each with its name, at the shorter one's context."""
    length = min(config.context_length for _, config in (one, other))
    described = [describe(config, name, Question(length)) for name, config in (one, other)]
    fields = [{k: _short(v) for k, v in flat(to_dict(config)).items()} for _, config in (one, other)]
    names = [*fields[0], *(name for name in fields[1] if name not in fields[0])]
    pairs = {name: (fields[0].get(name), fields[1].get(name)) for name in names}
    costs = [_costs(description) for description in described]
    return Comparison(
        (one[0], other[0]),
        {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        {name: (costs[0][name], costs[1][name]) for name in costs[0]},
    )


def _costs(description: Description) -> dict[str, float]:
    values = description.values
    length = values["flops_per_token"]["length"]
    return {
        "parameters": values["parameters"]["total"],
        "active parameters": values["parameters"]["active"],
        f"forward FLOPs per token at {length:,}": values["flops_per_token"]["forward"],
        "KV cache, bytes per token": values["kv_cache_bytes_per_token"],
        f"KV cache, bytes per {length:,} tokens": values["kv_cache_bytes_per_sequence"],
        "training state, bytes, ZeRO 0": values["memory_bytes"]["zero_0"]["total"],
    }


def _short(value: Any) -> Any:
    """Lists as text, each block by what is not its default."""
    if not isinstance(value, list):
        return value
    usual = to_dict(Block())

    def words(item: Any) -> str:
        return str({k: v for k, v in item.items() if v != usual[k]} or "plain") if isinstance(item, dict) else str(item)

    return "[" + ", ".join(map(words, value)) + "]"
