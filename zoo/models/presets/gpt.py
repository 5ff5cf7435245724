"""GPT-2 and GPT-3: learned positions, LayerNorm with biases, GELU, biases everywhere, one table for input and head."""

from zoo.config import ModelConfig
from zoo.models.presets.preset import Preset, Recipe

_GPT3 = "arXiv 2005.14165, table 2.1"


def _gpt(d_model: int, n_layers: int, n_heads: int, context_length: int, dropout: float) -> ModelConfig:
    return ModelConfig(
        vocab_size=50257,
        context_length=context_length,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        attention_bias=("q", "k", "v", "o"),
        position="learned",
        activation="gelu_tanh",
        glu=False,
        ffn_bias=True,
        norm="layernorm",
        norm_eps=1e-5,
        norm_bias=True,
        dropout=dropout,
        attention_dropout=dropout,
        out_init="gpt2",
        compute_dtype="bfloat16",
    )


def _gpt2(name: str, d_model: int, n_layers: int, n_heads: int) -> Preset:
    return Preset(_gpt(d_model, n_layers, n_heads, 1024, 0.1), f"openai-community/{name}, config.json")


PRESETS = {
    "gpt2": _gpt2("gpt2", 768, 12, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 1024, 24, 16),
    "gpt2-large": _gpt2("gpt2-large", 1280, 36, 20),
    "gpt2-xl": _gpt2("gpt2-xl", 1600, 48, 25),
    "gpt3-175b": Preset(
        _gpt(12288, 96, 96, 2048, 0.0),
        _GPT3,
        Recipe(learning_rate=0.6e-4, batch_tokens=3.2e6, tokens=300e9),
        "The exact count is derived, not published. GPT-3 alternates dense attention with banded sparse attention "
        "of an unpublished width; here every layer is dense.",
    ),
}
