"""A sparse mixture of experts: each token goes to 2 of 8 experts. moe_dense.py and moe_soft.py take its place.

    zoo train --config configs/moe_sparse.py

The same model with another mixture, or none: --mixture dense, soft or none.
"""

from zoo import Experiment, ModelConfig, OptimizerConfig, SparseConfig, TrainConfig

STEPS = 120

config = Experiment(
    name="moe_sparse",
    model=ModelConfig(
        context_length=256,
        d_model=256,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        moe=SparseConfig(n_experts=8, top_k=2, d_ff=256),
        qk_norm=True,
        zero_init_out=True,
        unroll=True,
    ),
    optimizer=OptimizerConfig(
        name="muon", learning_rate=3e-3, schedule="wsd", warmup_steps=10, decay_fraction=0.5, min_ratio=0.0
    ),
    train=TrainConfig(steps=STEPS, eval_every=None, save_every=STEPS // 3),
)
