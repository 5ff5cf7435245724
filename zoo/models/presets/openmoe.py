"""OpenMoE: every sixth layer adds 32 experts to an FFN that all tokens take; heads wider than the model."""

from zoo.config import Block, ModelConfig, SparseConfig
from zoo.models.presets.preset import Preset

PRESETS = {
    "openmoe-8b": Preset(
        ModelConfig(
            vocab_size=256384,
            context_length=2048,
            d_model=2048,
            n_layers=24,
            n_heads=24,
            head_dim=128,
            d_ff=8192,
            moe=SparseConfig(
                n_experts=32,
                d_ff=8192,
                n_shared_experts=1,
                top_k=2,
                renormalize=False,
                capacity_factor=1.25,
                # Its loss, of which 0.01 is the weight, is k = 2 at balance and not 1.
                balance_weight=0.01 * 2,
                z_weight=1e-4,
            ),
            pattern=(Block(mixture=False),) * 5 + (Block(),),
            compute_dtype="bfloat16",
        ),
        "arXiv 2402.01739, tables 11 and 12; openmoe_8b_config.json",
        note="The released code runs the fixed FFN after the experts behind a norm of its own; here both read the same "
        "norm, which saves 4 x 2,048 parameters.",
    ),
}
