"""Two models or two experiments side by side: what differs, and what it costs."""

from typing import Any, NamedTuple

from zoo.config import Block, Experiment, ModelConfig, flat, to_dict
from zoo.describe.memory import device_memory
from zoo.describe.question import Question, question_of
from zoo.describe.report import Description, describe
from zoo.models.decoder import build


class Comparison(NamedTuple):
    """Two models or experiments.

    Attributes:
        names: of both.
        differences: field -> its two values, where they differ; None where one lacks the field.
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


def compare(one: tuple[str, ModelConfig | Experiment], other: tuple[str, ModelConfig | Experiment]) -> Comparison:
    """Compares two models, each with its name, at the shorter one's context.

    Two experiments are compared in all of their settings, and in what their training costs, each with its own
    optimizer, batch and mesh, where an axis at -1 counts as 1. A model beside an experiment is compared with its model.

    Raises:
        ConfigError: as `describe` does.
    """
    configs = one[1], other[1]
    whole = all(isinstance(config, Experiment) for config in configs)
    models = [config.model if isinstance(config, Experiment) else config for config in configs]
    length = min(model.context_length for model in models)
    questions = [_at(length, config if whole else None) for config in configs]
    costs = [_costs(describe(m, n, q)) for m, (n, _), q in zip(models, (one, other), questions, strict=True)]
    if whole:
        costs = [cost | _training_costs(config) for cost, config in zip(costs, configs, strict=True)]
    return Comparison(
        (one[0], other[0]),
        _differences(*(_fields(config) for config in (configs if whole else models))),
        {name: (costs[0][name], costs[1][name]) for name in costs[0]},
    )


def _at(length: int, experiment: Experiment | None) -> Question:
    """What is asked at a common length: the state is that of the experiment's own optimizer."""
    if experiment is None:
        return Question(length)
    return Question(length, optimizer=experiment.optimizer.name, ema=experiment.optimizer.ema_decay is not None)


def _fields(config: ModelConfig | Experiment) -> dict[str, Any]:
    return {name: _short(value) for name, value in flat(to_dict(config)).items() if name != "name"}


def _differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*one, *(name for name in other if name not in one)]
    pairs = {name: (one.get(name), other.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


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


def _training_costs(experiment: Experiment) -> dict[str, float]:
    """What a device of the experiment's mesh holds, with its own batch and context, and the tokens in all."""
    question = question_of(experiment)
    kept = device_memory(experiment.model, build(experiment.model).abstract_params(), question)
    return {
        "devices of the mesh": question.n_devices,
        "sequences on a device": question.batch_size,
        "training state, bytes on a device": kept.state.total,
        "activations, bytes on a device": kept.activations,
        "logits, bytes on a device": kept.logits,
        "tokens of training": question.tokens,
    }


def _short(value: Any) -> Any:
    """Lists as text, each block by what is not its default."""
    if not isinstance(value, list):
        return value
    usual = to_dict(Block())

    def words(item: Any) -> str:
        return str({k: v for k, v in item.items() if v != usual[k]} or "plain") if isinstance(item, dict) else str(item)

    return "[" + ", ".join(map(words, value)) + "]"
