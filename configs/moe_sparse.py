"""A sparse mixture of experts: each token goes to 2 of 8 experts. moe_dense.py and moe_soft.py take its place.

    zoo train --config configs/moe_sparse.py

The same model with another mixture, or none: --mixture dense, soft or none.
"""

from zoo import DataConfig, Experiment, ModelConfig, OptimizerConfig, SparseConfig, TrainConfig

config = Experiment(
    name="moe_sparse",
    model=ModelConfig(
        context_length=512,
        d_model=384,
        n_layers=6,
        n_heads=6,
        n_kv_heads=2,
        moe=SparseConfig(n_experts=8, top_k=2, d_ff=512),
        qk_norm=True,
        zero_init_out=True,
    ),
    data=DataConfig(vocab_size=4096),
    optimizer=OptimizerConfig(name="muon", learning_rate=3e-3, muon_learning_rate=0.02, schedule="wsd"),
    train=TrainConfig(steps=2000, batch_size=32, sample_every=500, sample_prompt="def "),
)
