"""Pythia (GPT-NeoX): a quarter of each head turns, attention and FFN side by side behind two norms."""

from zoo.config import ModelConfig
from zoo.models.presets.preset import Preset

PRESETS = {
    "pythia-160m": Preset(
        ModelConfig(
            vocab_size=50304,
            context_length=2048,
            d_model=768,
            n_layers=12,
            n_heads=12,
            attention_bias=("q", "k", "v", "o"),
            rope_fraction=0.25,
            activation="gelu",
            glu=False,
            ffn_bias=True,
            norm="layernorm",
            norm_eps=1e-5,
            norm_bias=True,
            parallel="two_norms",
            tie_embeddings=False,
            compute_dtype="bfloat16",
        ),
        "EleutherAI/pythia-160m, config.json; arXiv 2304.01373",
    ),
}
