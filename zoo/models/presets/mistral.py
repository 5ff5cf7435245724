"""Mistral and Mixtral: LLaMA's block with grouped heads; a sliding window, or a sparse mixture of 8 experts."""

from zoo.config import Block, ModelConfig, SparseConfig
from zoo.models.presets.preset import Preset


def _mixtral(
    vocab_size: int,
    context_length: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    router_aux_loss_coef: float,
) -> ModelConfig:
    # Hugging Face's loss, of which config.json has the weight, is k = 2 at balance and not 1.
    moe = SparseConfig(n_experts=8, d_ff=d_ff, top_k=2, balance_weight=router_aux_loss_coef * 2, z_weight=0.0)
    return ModelConfig(
        vocab_size=vocab_size,
        context_length=context_length,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        d_ff=d_ff,
        moe=moe,
        rope_theta=1_000_000.0,
        norm_eps=1e-5,
        tie_embeddings=False,
        compute_dtype="bfloat16",
    )


PRESETS = {
    "mistral-7b": Preset(
        ModelConfig(
            vocab_size=32000,
            context_length=32768,
            d_model=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            d_ff=14336,
            pattern=(Block(window=4096),),
            norm_eps=1e-5,
            tie_embeddings=False,
            compute_dtype="bfloat16",
        ),
        "mistralai/Mistral-7B-v0.1, config.json; arXiv 2310.06825, table 1",
    ),
    "mixtral-8x7b": Preset(
        _mixtral(32000, 32768, 4096, 32, 32, 14336, router_aux_loss_coef=0.02),
        "mistralai/Mixtral-8x7B-v0.1, config.json; arXiv 2401.04088",
    ),
    "mixtral-8x22b": Preset(
        _mixtral(32768, 65536, 6144, 56, 48, 16384, router_aux_loss_coef=0.001),
        "mistralai/Mixtral-8x22B-Instruct-v0.1, config.json",
        note="The first base release has 32,000 rows in its tables; later ones have 32,768, as here.",
    ),
}
