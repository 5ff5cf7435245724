"""Mixtral 8x7B from scratch on a TPU pod slice: the same command on every host, which finds the others by itself.

zoo train --config configs/mixtral_8x7b_pod.py --data.path "/data/*.parquet" --data.tokenizer-model /data/spm.model

Experts go over 8 chips, state over the groups of 8 (32 of them on 256 chips) and the batch over all chips: a
micro-batch has 256 windows, so there is one for each of 256 chips, and on more of them fewer micro-batches. In an
expert layer the chips of a group exchange their tokens. 4.2 M tokens a batch. On 8 fake devices a test lowers this
step at full size; it has not been run on a pod.
"""

from zoo import DataConfig, Experiment, MeshConfig, OptimizerConfig, TrainConfig, preset

config = Experiment(
    name="mixtral_8x7b_pod",
    model=preset("mixtral-8x7b", context_length=4096, compute_dtype="bfloat16", remat="full"),
    data=DataConfig(vocab_size=32_000),
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000, min_ratio=0.1),
    train=TrainConfig(
        steps=250_000,
        batch_size=1024,
        micro_batches=4,
        eval_every=2000,
        save_every=1000,
        keep_every=50_000,
        eval_batch_size=256,
    ),
    mesh=MeshConfig(data=1, fsdp=-1, expert=8, zero=3),
)
