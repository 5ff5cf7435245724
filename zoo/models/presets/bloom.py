"""BLOOM: ALiBi, and a norm right after the embedding."""

from zoo.config import ModelConfig
from zoo.models.presets.preset import Preset

PRESETS = {
    "bloom-560m": Preset(
        ModelConfig(
            vocab_size=250880,
            context_length=2048,
            d_model=1024,
            n_layers=24,
            n_heads=16,
            attention_bias=("q", "k", "v", "o"),
            position="alibi",
            activation="gelu_tanh",
            glu=False,
            ffn_bias=True,
            norm="layernorm",
            norm_eps=1e-5,
            norm_bias=True,
            embedding_norm=True,
            compute_dtype="bfloat16",
        ),
        "bigscience/bloom-560m, config.json; arXiv 2211.05100",
    ),
}
