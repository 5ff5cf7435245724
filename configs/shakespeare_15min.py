"""Shakespeare by characters in 15 minutes on two CPU cores: a validation loss under a 7-gram's.

    zoo train --config configs/shakespeare_15min.py --data.path tinyshakespeare.txt

The last tenth of the text is for validation, in windows of 256 characters.
"""

from zoo import DataConfig, Experiment, ModelConfig, OptimizerConfig, TrainConfig

config = Experiment(
    name="shakespeare_15min",
    model=ModelConfig(
        context_length=256,
        d_model=192,
        n_layers=6,
        n_heads=6,
        d_ff=768,
        activation="relu2",
        glu=False,
        qk_norm="head",
        tie_embeddings=False,
        out_init="zero",
        dropout=0.1,
        unroll=True,
    ),
    data=DataConfig(
        path="tinyshakespeare.txt",
        tokenizer="characters",
        validation_fraction=0.1,
        split="tail",
        add_bos=False,
        add_eos=False,
    ),
    optimizer=OptimizerConfig(
        name="muon",
        learning_rate=3e-3,
        muon_learning_rate=0.02,
        warmup_steps=100,
        min_ratio=0.0,
    ),
    train=TrainConfig(steps=2200, batch_size=16, sample_every=500, sample_prompt="\n"),
)
