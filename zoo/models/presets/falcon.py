"""Falcon-7B: one key and value head for 71 query heads, attention and FFN side by side behind one norm."""

from zoo.config import ModelConfig
from zoo.models.presets.preset import Preset

PRESETS = {
    "falcon-7b": Preset(
        ModelConfig(
            vocab_size=65024,
            context_length=2048,
            d_model=4544,
            n_layers=32,
            n_heads=71,
            n_kv_heads=1,
            activation="gelu",
            glu=False,
            norm="layernorm",
            norm_eps=1e-5,
            norm_bias=True,
            parallel="one_norm",
            logit_z_weight=1e-4,
            compute_dtype="bfloat16",
        ),
        "tiiuae/falcon-7b, config.json and model card; arXiv 2311.16867",
    ),
}
