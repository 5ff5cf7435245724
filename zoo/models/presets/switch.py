"""The decoders of Switch-Base as language models of their own: every second layer sends a token to one expert."""

from zoo.config import Block, ModelConfig, SparseConfig
from zoo.models.presets.preset import Preset


def _switch(n_experts: int) -> Preset:
    moe = SparseConfig(
        n_experts=n_experts,
        d_ff=3072,
        top_k=1,
        router_jitter=0.01,
        capacity_factor=1.25,
        balance_weight=0.01,
        z_weight=0.0,
    )
    model = ModelConfig(
        vocab_size=32128,
        context_length=512,
        d_model=768,
        n_layers=12,
        n_heads=12,
        d_ff=3072,
        moe=moe,
        pattern=(Block(mixture=False), Block()),
        activation="relu",
        glu=False,
        dropout=0.1,
        attention_dropout=0.1,
        compute_dtype="bfloat16",
    )
    return Preset(
        model,
        "arXiv 2101.03961, section 2 and table 9; flaxformer's switch_base.gin",
        note="The model is an encoder and a decoder; this is its decoder without cross-attention, with rotary "
        "positions in place of T5's relative biases. The count is derived.",
    )


PRESETS = {f"switch-base-{n_experts}-decoder": _switch(n_experts) for n_experts in (8, 128)}
