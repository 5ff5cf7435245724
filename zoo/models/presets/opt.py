"""OPT: GPT-2's shape with ReLU, and two unused rows ahead of the learned positions."""

from zoo.config import ModelConfig
from zoo.models.presets.preset import Preset

PRESETS = {
    "opt-125m": Preset(
        ModelConfig(
            vocab_size=50272,
            context_length=2048,
            d_model=768,
            n_layers=12,
            n_heads=12,
            attention_bias=("q", "k", "v", "o"),
            position="learned",
            position_offset=2,
            activation="relu",
            glu=False,
            ffn_bias=True,
            norm="layernorm",
            norm_eps=1e-5,
            norm_bias=True,
            dropout=0.1,
            init_std=0.006,
            out_init="gpt2",
            compute_dtype="bfloat16",
        ),
        "facebook/opt-125m, config.json; initializers: arXiv 2205.01068, section 2.2",
    ),
}
