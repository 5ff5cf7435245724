"""Qwen: biases on queries, keys and values up to 2.5; a norm of each head's queries and keys instead in 3."""

from typing import Any

from zoo.config import ModelConfig, SparseConfig
from zoo.models.presets.preset import Preset

_QKV = ("q", "k", "v")


def _qwen(**own: Any) -> ModelConfig:
    return ModelConfig(**{"vocab_size": 151936, "rope_theta": 1_000_000.0, "compute_dtype": "bfloat16"} | own)


PRESETS = {
    "qwen2.5-0.5b": Preset(
        _qwen(
            context_length=32768,
            d_model=896,
            n_layers=24,
            n_heads=14,
            n_kv_heads=2,
            d_ff=4864,
            attention_bias=_QKV,
        ),
        "Qwen/Qwen2.5-0.5B, config.json",
    ),
    "qwen3-0.6b": Preset(
        _qwen(
            context_length=40960,
            d_model=1024,
            n_layers=28,
            n_heads=16,
            n_kv_heads=8,
            head_dim=128,
            d_ff=3072,
            qk_norm="head",
        ),
        "Qwen/Qwen3-0.6B, config.json; arXiv 2505.09388",
    ),
    "qwen3-30b-a3b": Preset(
        _qwen(
            context_length=40960,
            d_model=2048,
            n_layers=48,
            n_heads=32,
            n_kv_heads=4,
            head_dim=128,
            d_ff=6144,
            # Hugging Face's loss, of which 0.001 is the weight, is k at balance and not 1.
            moe=SparseConfig(n_experts=128, d_ff=768, top_k=8, balance_weight=0.001 * 8, z_weight=0.0),
            qk_norm="head",
            tie_embeddings=False,
        ),
        "Qwen/Qwen3-30B-A3B, config.json; arXiv 2505.09388",
    ),
    "qwen1.5-moe-a2.7b": Preset(
        _qwen(
            context_length=8192,
            d_model=2048,
            n_layers=24,
            n_heads=16,
            d_ff=5632,
            moe=SparseConfig(
                n_experts=60,
                d_ff=1408,
                n_shared_experts=4,
                shared_gate=True,
                top_k=4,
                renormalize=False,
                balance_weight=0.001 * 4,
                z_weight=0.0,
            ),
            attention_bias=_QKV,
            tie_embeddings=False,
        ),
        "Qwen/Qwen1.5-MoE-A2.7B, config.json",
    ),
}
