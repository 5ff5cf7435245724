"""Small models and laws such that every two choices of parts, and every part and law, meet at least once."""

from typing import Any

from allpairspy import AllPairs

from zoo.config import (
    Block,
    DenseConfig,
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    SoftConfig,
    SparseConfig,
    YarnScaling,
)

SIZES = {"vocab_size": 46, "context_length": 24, "d_model": 16, "n_layers": 2, "n_heads": 4, "head_dim": 8, "d_ff": 24}
EXPERTS = {"n_experts": 4, "d_ff": 12}
LONG = LongRopeScaling(2.0, 12, short_factors=(1.0, 1.5, 2.0, 2.5), long_factors=(1.0, 2.0, 3.0, 4.0))

# Factor -> choice -> fields of ModelConfig. What belongs together, or cannot stand together, is one choice.
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "mixture": {
        "none": {},
        "softmax": {"moe": SparseConfig(**EXPERTS, importance_weight=0.01, n_shared_experts=1, shared_gate=True)},
        "selected": {"moe": SparseConfig(**EXPERTS, score="softmax_selected", router_bias=True, capacity_factor=0.75)},
        "sigmoid": {
            "moe": SparseConfig(
                **EXPERTS,
                score="sigmoid",
                selection_bias=True,
                n_groups=2,
                top_groups=1,
                group_score="top2_sum",
                routed_scale=2.5,
                balance_scope="sequence",
            )
        },
        "null": {"moe": SparseConfig(**EXPERTS, top_k=3, n_shared_experts=1, shared_in_top_k=True, n_null_experts=2)},
        "reroute": {
            "moe": SparseConfig(
                **EXPERTS,
                n_groups=2,
                capacity_factor=0.75,
                overflow="reroute",
                device_weight=0.1,
                communication_weight=0.1,
            )
        },
        "dense": {"moe": DenseConfig(**EXPERTS, balance_weight=0.01)},
        "soft": {"moe": SoftConfig(**EXPERTS, segment_length=4, max_documents=3, balance_weight=0.01)},
    },
    "position": {
        "rope": {"pattern": (Block(window=5, rope_theta=100.0), Block())},
        "interleaved": {"rope_fraction": 0.5, "rope_interleaved": True, "rope_scaling": YarnScaling(4.0, 8)},
        "alibi": {"position": "alibi"},
        "sinusoidal": {"position": "sinusoidal", "embedding_scale": True},
        "learned": {"position": "learned", "position_offset": 2, "embedding_norm": True},
        "none": {"position": "none"},
    },
    "residual": {
        "pre": {"norm_bias": True},
        "post": {"norm_placement": "post", "norm": "layernorm", "norm_bias": True, "init": "truncated_normal"},
        "sandwich": {"norm_placement": "sandwich", "norm_unit_offset": True, "init": "scaled_normal"},
        "deepnorm": {"norm_placement": "deepnorm", "norm": "layernorm", "init": "deepnorm"},
        "one norm": {"parallel": "one_norm", "norm": "layernorm", "norm_scale": False, "out_init": "gpt2"},
        "two norms": {"parallel": "two_norms", "norm": "layernorm", "norm_bias": True},
    },
    "feed-forward": {
        "glu": {"activation": "sigmoid"},
        "relu": {"activation": "relu", "glu": False, "ffn_bias": True},
        "relu2": {"activation": "relu2", "glu": False},
        "gelu": {"activation": "gelu", "ffn_bias": True},
        "clamped": {"activation": "swish", "swish_beta": 1.702, "glu_clamp": 0.5, "ffn_bias": True},
        "learned": {"activation": "swish_learned"},
    },
    "attention": {
        "plain": {},
        "softcap": {"attention_softcap": 2.0, "attention_scale": 0.5, "n_kv_heads": 2},
        "sinks": {"attention_sinks": True, "n_kv_heads": 1, "attention_bias": ("q", "k", "v")},
        "head norm": {"qk_norm": "head", "n_kv_heads": 2, "attention_bias": ("q", "k", "v", "o")},
        "full norm": {"qk_norm": "full"},
    },
    "head": {
        "tied": {},
        "bias": {"tie_embeddings": False, "head_bias": True, "vocab_multiple": 8},
        "softcap": {"logit_softcap": 3.0, "logit_z_weight": 0.01, "vocab_multiple": 4},
    },
}
# Sharding compiles a program for every mesh: test_laws.py tries it on one model of each mixture.
LAWS = ("causality", "padding", "packing", "batch", "cache", "accumulation", "compilation", "equivalence")
# The scalings differ in a table of constants only, so each is tried once.
SCALINGS = [LinearScaling(2.0), DynamicNTKScaling(2.0, 12), Llama3Scaling(4.0, 8), LONG]


def rows() -> list[dict[str, str]]:
    """Choices by factor, and a "law": a pairwise cover of PARTS and LAWS."""
    factors = factor_choices()
    return [dict(zip(factors, row, strict=True)) for row in AllPairs(list(factors.values()))]


def factor_choices() -> dict[str, list[str]]:
    """The names of all choices of every factor."""
    return {name: list(choices) for name, choices in PARTS.items()} | {"law": list(LAWS)}


def model(row: dict[str, str]) -> ModelConfig:
    """The model of a row."""
    fields = dict(SIZES)
    for name, choices in PARTS.items():
        fields |= choices[row[name]]
    return ModelConfig(**fields)
