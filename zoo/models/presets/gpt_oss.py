"""gpt-oss: alternating windows, attention sinks, a router with a bias, clamped SwiGLU experts with biases."""

from zoo.config import Block, ModelConfig, SparseConfig, YarnScaling
from zoo.models.presets.preset import Preset

PRESETS = {
    "gpt-oss-20b": Preset(
        ModelConfig(
            vocab_size=201088,
            context_length=131072,
            d_model=2880,
            n_layers=24,
            n_heads=64,
            n_kv_heads=8,
            head_dim=64,
            d_ff=2880,
            moe=SparseConfig(n_experts=32, d_ff=2880, top_k=4, score="softmax_selected", router_bias=True),
            pattern=(Block(window=128), Block()),
            attention_bias=("q", "k", "v", "o"),
            attention_sinks=True,
            rope_theta=150_000.0,
            rope_scaling=YarnScaling(factor=32.0, original_context=4096, truncate=False),
            activation="swish",
            swish_beta=1.702,
            glu_clamp=7.0,
            ffn_bias=True,
            norm_eps=1e-5,
            tie_embeddings=False,
            compute_dtype="bfloat16",
        ),
        "openai/gpt-oss-20b, config.json; arXiv 2508.10925",
        note="The weights of its balance losses are not published; the zoo's defaults stand in.",
    ),
}
