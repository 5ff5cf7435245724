"""LLaMA 1 to 3 and SmolLM2: rotary positions, RMSNorm, SwiGLU, no biases."""

from typing import Any

from zoo.config import ModelConfig, OptimizerConfig
from zoo.models.presets.preset import Preset, Recipe

_LLAMA1 = "arXiv 2302.13971, table 2; norm_eps: params.json of the release"
_LLAMA2 = "arXiv 2307.09288, table 1; meta-llama/Llama-2, config.json"
_LLAMA3 = "arXiv 2407.21783, table 3; meta-llama/Meta-Llama-3, config.json"


def _llama(d_model: int, n_layers: int, n_heads: int, d_ff: int, **own: Any) -> ModelConfig:
    shape = {"d_model": d_model, "n_layers": n_layers, "n_heads": n_heads, "d_ff": d_ff}
    common = {"vocab_size": 32000, "tie_embeddings": False, "compute_dtype": "bfloat16"}
    return ModelConfig(**common | shape | own)


def _adamw(learning_rate: float, **own: float) -> OptimizerConfig:
    """LLaMA 1, section 2.3, which has no eps, and LLaMA 2, section 2.2."""
    return OptimizerConfig(
        "adamw",
        learning_rate,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        clip_norm=1.0,
        schedule="cosine",
        warmup_steps=2000,
        min_ratio=0.1,
        **own,
    )


def _llama1(*shape: int, recipe: Recipe, norm_eps: float = 1e-6) -> Preset:
    model = _llama(*shape, context_length=2048, norm_eps=norm_eps)
    return Preset(model, _LLAMA1, recipe, optimizer=_adamw(recipe.learning_rate))


def _llama2(*shape: int, n_kv_heads: int | None = None, learning_rate: float) -> Preset:
    model = _llama(*shape, n_kv_heads=n_kv_heads, context_length=4096, norm_eps=1e-5)
    recipe = Recipe(learning_rate, batch_tokens=4e6, tokens=2e12)
    return Preset(model, _LLAMA2, recipe, optimizer=_adamw(learning_rate, eps=1e-5))


def _llama3(*shape: int) -> Preset:
    sizes = {"vocab_size": 128256, "n_kv_heads": 8, "context_length": 8192}
    return Preset(_llama(*shape, **sizes, norm_eps=1e-5, rope_theta=500_000.0), _LLAMA3)


PRESETS = {
    "llama-7b": _llama1(4096, 32, 32, 11008, recipe=Recipe(3e-4, 4e6, 1.0e12)),
    "llama-13b": _llama1(5120, 40, 40, 13824, recipe=Recipe(3e-4, 4e6, 1.0e12)),
    "llama-33b": _llama1(6656, 60, 52, 17920, recipe=Recipe(1.5e-4, 4e6, 1.4e12)),
    "llama-65b": _llama1(8192, 80, 64, 22016, recipe=Recipe(1.5e-4, 4e6, 1.4e12), norm_eps=1e-5),
    "llama2-7b": _llama2(4096, 32, 32, 11008, learning_rate=3e-4),
    "llama2-70b": _llama2(8192, 80, 64, 28672, n_kv_heads=8, learning_rate=1.5e-4),
    "llama3-8b": _llama3(4096, 32, 32, 14336),
    "llama3-70b": _llama3(8192, 80, 64, 28672),
    "smollm2-135m": Preset(
        _llama(
            576,
            30,
            9,
            1536,
            vocab_size=49152,
            n_kv_heads=3,
            context_length=8192,
            norm_eps=1e-5,
            rope_theta=100_000.0,
            tie_embeddings=True,
            init_std=576**-0.5,
        ),
        "HuggingFaceTB/SmolLM2-135M, config.json",
    ),
}
