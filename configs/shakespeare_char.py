"""Shakespeare by characters within nanoGPT's CPU budget: at most 0.82 M parameters, context 64, 1.536 M characters.

    zoo train --config configs/shakespeare_char.py --data.path tinyshakespeare.txt

The last tenth of the text is for validation, in windows of 64 characters. On two CPU cores: 2.5 minutes, 1.585 nats
per character (seeds 0, 1, 2: 1.595, 1.586, 1.574).
"""

from zoo import DataConfig, Experiment, ModelConfig, OptimizerConfig, TrainConfig

config = Experiment(
    name="shakespeare_char",
    model=ModelConfig(
        context_length=64,
        d_model=128,
        n_layers=4,
        n_heads=4,
        d_ff=512,
        activation="relu2",
        glu=False,
        qk_norm="head",
        tie_embeddings=False,
        out_init="zero",
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
    train=TrainConfig(steps=2000, batch_size=12, sample_every=500, sample_prompt="\n"),
)
