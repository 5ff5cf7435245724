"""DeepSeekMoE: many small experts, two shared ones, and a first layer without a mixture."""

from zoo.config import Block, ModelConfig, SparseConfig
from zoo.models.presets.preset import Preset

PRESETS = {
    "deepseek-moe-16b": Preset(
        ModelConfig(
            vocab_size=102400,
            context_length=4096,
            d_model=2048,
            n_layers=28,
            n_heads=16,
            d_ff=10944,
            moe=SparseConfig(
                n_experts=64,
                d_ff=1408,
                n_shared_experts=2,
                top_k=6,
                renormalize=False,
                balance_weight=0.001,
                z_weight=0.0,
            ),
            prefix=(Block(mixture=False),),
            tie_embeddings=False,
            init_std=0.006,
            compute_dtype="bfloat16",
        ),
        "deepseek-ai/deepseek-moe-16b-base, config.json; arXiv 2401.06066, sections 5.1 and table 7",
    ),
}
