"""Small models that between them have every part and mixture: what the laws are run on."""

from zoo.config import Block, DenseConfig, ModelConfig, SoftConfig, SparseConfig

_SIZES = {"vocab_size": 48, "context_length": 32, "d_model": 16, "n_layers": 2, "n_heads": 4, "head_dim": 8, "d_ff": 32}
_EXPERTS = {"n_experts": 4, "d_ff": 16}

ARCHITECTURES: dict[str, ModelConfig] = {
    # grouped heads, local and full layers, a rest of the pattern
    "none": ModelConfig(**_SIZES | {"n_layers": 3}, n_kv_heads=2, pattern=(Block(window=5), Block())),
    # multi-head, a capacity that drops, a shared expert, a dense layer first
    "sparse": ModelConfig(
        **_SIZES,
        prefix=(Block(mixture=False),),
        moe=SparseConfig(**_EXPERTS, capacity_factor=0.75, n_shared_experts=1),
    ),
    # one key head, plain experts, raw probabilities, normalized queries and keys, a head of its own
    "sparse-top1": ModelConfig(
        **_SIZES,
        n_kv_heads=1,
        moe=SparseConfig(**_EXPERTS, top_k=1, renormalize=False),
        activation="relu2",
        glu=False,
        qk_norm="head",
        tie_embeddings=False,
    ),
    "dense": ModelConfig(**_SIZES, n_kv_heads=2, moe=DenseConfig(**_EXPERTS, balance_weight=0.01), activation="gelu"),
    "soft": ModelConfig(
        **_SIZES,
        n_kv_heads=2,
        pattern=(Block(window=6),),
        moe=SoftConfig(**_EXPERTS, segment_length=4, max_documents=3, balance_weight=0.01, n_shared_experts=1),
    ),
}
