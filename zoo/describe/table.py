"""All presets in one Markdown table: docs/presets.md."""

from zoo.config import ModelConfig
from zoo.describe.flops import forward_flops
from zoo.describe.memory import kv_bytes_per_token
from zoo.describe.parameters import count_parameters, count_parts
from zoo.describe.report import markdown
from zoo.models.decoder import build
from zoo.models.presets import find_preset, preset_names

HEADER = """# Presets

Written by `zoo describe --all`. Counts are exact, from the abstract parameters. FLOPs of a forward pass are per token
at 2,048 tokens, or the model's context where that is shorter; the cache is that of one token in bfloat16.
"""
COLUMNS = ["preset", "layers", "width", "heads / kv", "mixture", "parameters", "active", "without embedding"]
COLUMNS += ["forward FLOPs", "KV bytes", "source"]


def preset_table() -> str:
    """The table, with its heading and the notes of the presets below it."""
    notes = [f"- {name}: {find_preset(name).note}" for name in preset_names() if find_preset(name).note]
    return "\n".join([HEADER, markdown(COLUMNS, map(_row, preset_names())), "", "## Notes", "", *notes, ""])


def _row(name: str) -> list[str]:
    config = find_preset(name).model
    specs = build(config).abstract_params()
    count, parts = count_parameters(config, specs), count_parts(config, specs)
    forward = forward_flops(config, min(2048, config.context_length), specs)
    return [
        name,
        str(config.n_layers),
        str(config.d_model),
        f"{config.n_heads} / {config.n_kv_heads or config.n_heads}",
        _mixture(config),
        f"{count.total:,}",
        f"{count.active:,}",
        f"{count.active - parts['token embedding'].total:,}",
        f"{forward:.3g}",
        f"{kv_bytes_per_token(config):,}",
        find_preset(name).source,
    ]


def _mixture(config: ModelConfig) -> str:
    if config.moe is None:
        return ""
    shared = f" + {config.moe.n_shared_experts}" if config.moe.n_shared_experts else ""
    return f"{config.moe.k} of {config.moe.n_experts}{shared}"
