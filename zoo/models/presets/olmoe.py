"""OLMoE: 64 small experts, chosen without renormalization, and a norm over all heads of queries and keys together."""

from zoo.config import ModelConfig, SparseConfig
from zoo.models.presets.preset import Preset

PRESETS = {
    "olmoe-1b-7b": Preset(
        ModelConfig(
            vocab_size=50304,
            context_length=4096,
            d_model=2048,
            n_layers=16,
            n_heads=16,
            d_ff=1024,
            moe=SparseConfig(n_experts=64, d_ff=1024, top_k=8, renormalize=False, balance_weight=0.01, z_weight=0.001),
            qk_norm="full",
            norm_eps=1e-5,
            tie_embeddings=False,
            init="truncated_normal",
            compute_dtype="bfloat16",
        ),
        "allenai/OLMoE-1B-7B-0924, config.json; arXiv 2409.02060",
        note="Its initializer is cut off at three deviations, the zoo's at two.",
    ),
}
