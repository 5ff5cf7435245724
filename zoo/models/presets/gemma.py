"""Gemma 1 to 3: GEGLU, scaled tied embeddings, norms that multiply by 1 + scale; from 2 on windows and more norms."""

from typing import Any

from zoo.config import Block, ModelConfig
from zoo.models.presets.preset import Preset


def _gemma(**own: Any) -> ModelConfig:
    common = {
        "head_dim": 256,
        "activation": "gelu_tanh",
        "norm_unit_offset": True,
        "embedding_scale": True,
        "compute_dtype": "bfloat16",
    }
    return ModelConfig(**common | own)


PRESETS = {
    "gemma-2b": Preset(
        _gemma(
            vocab_size=256000,
            context_length=8192,
            d_model=2048,
            n_layers=18,
            n_heads=8,
            n_kv_heads=1,
            d_ff=16384,
        ),
        "google/gemma-2b, config.json; arXiv 2403.08295, table 1",
    ),
    "gemma2-2b": Preset(
        _gemma(
            vocab_size=256000,
            context_length=8192,
            d_model=2304,
            n_layers=26,
            n_heads=8,
            n_kv_heads=4,
            d_ff=9216,
            pattern=(Block(window=4096), Block()),
            attention_softcap=50.0,
            norm_placement="sandwich",
            logit_softcap=30.0,
        ),
        "google/gemma-2-2b, config.json; arXiv 2408.00118, table 1",
    ),
    "gemma3-270m": Preset(
        _gemma(
            vocab_size=262144,
            context_length=32768,
            d_model=640,
            n_layers=18,
            n_heads=4,
            n_kv_heads=1,
            d_ff=2048,
            pattern=(Block(window=512, rope_theta=10_000.0),) * 5 + (Block(),),
            qk_norm="head",
            rope_theta=1_000_000.0,
            norm_placement="sandwich",
        ),
        "google/gemma-3-270m, config.json; arXiv 2503.19786",
    ),
}
