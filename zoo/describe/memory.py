"""Bytes: of training under ZeRO, of activations, of the cache of keys and values."""

from typing import NamedTuple

import numpy as np

from zoo.config import BlockConfig, DenseConfig, ModelConfig, SparseConfig
from zoo.objectives import CHUNK_SIZE

# Bytes per parameter of the optimizers' moments, which are float32; Adafactor's factored ones are next to nothing.
MOMENTS = {"adamw": 8, "muon": 4, "lion": 4, "adafactor": 0}


class TrainingState(NamedTuple):
    """Bytes of one device's part of the training state: weights, float32 gradients, moments."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


def itemsize(dtype: str) -> int:
    """Bytes of a number."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def training_state(n_parameters: int, config: ModelConfig, optimizer: str, zero: int, n_devices: int) -> TrainingState:
    """What each of `n_devices` holds under ZeRO 0 (nothing is split) to 3 (arXiv 1910.02054, section 5).

    Weights are in param_dtype, gradients and moments in float32; of Muon's, the matrices' one moment.
    """
    parts = itemsize(config.param_dtype), 4, MOMENTS[optimizer]
    split = (zero >= 3, zero >= 2, zero >= 1)
    return TrainingState(*(n_parameters * size / (n_devices if s else 1) for size, s in zip(parts, split, strict=True)))


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Keys and values of one token in all layers, in the compute dtype: 2 K h bytes L."""
    blocks = [block for stage in config.expand() for block in stage.blocks * stage.repeat]
    return sum(2 * b.n_kv_heads * b.head_dim for b in blocks) * itemsize(config.compute_dtype)


def kv_bytes_per_sequence(config: ModelConfig, length: int) -> int:
    """Keys and values of a sequence of `length` tokens; a window keeps no more than it is wide."""
    blocks = [block for stage in config.expand() for block in stage.blocks * stage.repeat]
    slots = sum(2 * b.n_kv_heads * b.head_dim * min(length, b.window or length) for b in blocks)
    return slots * itemsize(config.compute_dtype)


def activation_bytes_per_token(config: ModelConfig, length: int) -> float:
    """What the backward pass keeps of a token, of `length` in its sequence; an estimate.

    Per block the inputs of its products and norms, in the compute dtype, and the float32 weights of every head's
    attention, which the present attention keeps. With remat="full", the block's input, and one block's activations.
    """
    size = itemsize(config.compute_dtype)
    blocks = [block for stage in config.expand() for block in stage.blocks * stage.repeat]
    each = [_block_numbers(block) * size + 4 * block.n_heads * length for block in blocks]
    if config.remat == "none":
        return float(sum(each))
    return float(len(blocks) * config.d_model * size + max(each))


def _block_numbers(block: BlockConfig) -> float:
    attention = 4 * block.d_model + 2 * block.n_heads * block.head_dim + 2 * block.n_kv_heads * block.head_dim
    matrices = 3 if block.glu else 2
    if block.moe is None:
        return attention + matrices * block.d_ff
    experts = block.moe.n_experts if isinstance(block.moe, DenseConfig) else block.moe.k
    rows = experts if isinstance(block.moe, SparseConfig) else 0  # a sparse mixture copies a token for each expert
    return attention + rows * block.d_model + matrices * block.moe.d_ff * (experts + block.moe.n_shared_experts)


def logit_bytes(config: ModelConfig, tokens: int) -> tuple[int, int]:
    """Float32 logits of so many tokens: whole, and the chunk of them that is ever in memory."""
    whole = 4 * tokens * config.padded_vocab_size
    return whole, min(whole, 4 * max(CHUNK_SIZE, config.padded_vocab_size))
