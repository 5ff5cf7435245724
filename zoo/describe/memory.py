"""Bytes: of training under ZeRO, of activations, of the cache of keys and values."""

from typing import NamedTuple

import jax.numpy as jnp

from zoo.config import BlockConfig, DenseConfig, ModelConfig, Remat, SoftConfig, SparseConfig
from zoo.describe.parameters import Parameters, blocks_of
from zoo.layers.moe.soft import segment_slots
from zoo.objectives import CHUNK_SIZE

# Bytes per parameter of the optimizers' moments, which are float32: two of Adam, one of Lion. Adafactor's are a number
# for each row and column of a matrix, next to nothing. Muon has one of each matrix, and Adam's two of all else.
MOMENTS = {"adamw": 8, "muon": 8, "lion": 4, "adafactor": 0}
MUON_SAVES = 4


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
    return jnp.dtype(dtype).itemsize


def training_state(
    count: Parameters, config: ModelConfig, optimizer: str, zero: int, n_devices: int, ema: bool = False
) -> TrainingState:
    """What each of `n_devices` holds under ZeRO 0 (nothing is split) to 3 (arXiv 1910.02054, section 5).

    Weights are in param_dtype, gradients, moments and a running mean of the weights in float32; the mean counts, and
    is split, with the optimizer.
    """
    moments = MOMENTS[optimizer] * count.total - (MUON_SAVES * count.matrices if optimizer == "muon" else 0)
    moments += 4 * count.total if ema else 0
    parts = count.total * itemsize(config.param_dtype), count.total * 4, moments
    split = (zero >= 3, zero >= 2, zero >= 1)
    return TrainingState(*(size / (n_devices if s else 1) for size, s in zip(parts, split, strict=True)))


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Keys and values of one token in all layers, in the compute dtype: 2 K h bytes L."""
    return sum(2 * b.n_kv_heads * b.head_dim for b in blocks_of(config)) * itemsize(config.compute_dtype)


def kv_bytes_per_sequence(config: ModelConfig, length: int) -> int:
    """Keys and values of a sequence of `length` tokens; a window keeps no more than it is wide."""
    slots = sum(2 * b.n_kv_heads * b.head_dim * min(length, b.window or length) for b in blocks_of(config))
    return slots * itemsize(config.compute_dtype)


# What the backward pass keeps of a token: c bytes of the compute dtype for each number that a product or a norm reads,
# and the float32 weights of attention, which the present kernel keeps. A token has m rows of F hidden units and, in a
# sparse mixture, as many copies; an FFN has n matrices.
ACTIVATIONS = {
    "none": "L (c (4 D + 2 H h + 2 K h + m D + n m F) + 4 H T)",
    "full": "L c D + one block's c (4 D + 2 H h + 2 K h + m D + n m F) + 4 H T",
    "dots": "L (c (3 D + 2 H h + 2 K h + (n - 1) m F) + 4 H T) + one block's",
    "dots_no_batch": "L c (3 D + H h + 2 K h + (n - 1) m F) + one block's",
}


def activation_bytes_per_token(config: ModelConfig, length: int) -> float:
    """What the backward pass keeps of a token, of `length` in its sequence; an estimate, by `ACTIVATIONS`.

    With remat, what its policy keeps of every block and all of the one that is computed again.
    """
    blocks = blocks_of(config)
    whole = [_kept(block, "none", length) for block in blocks]
    if config.remat == "none":
        return float(sum(whole))
    return float(sum(_kept(block, config.remat, length) for block in blocks) + max(whole))


def _kept(block: BlockConfig, remat: Remat, length: int) -> float:
    """Bytes that a block keeps of a token."""
    size, heads = itemsize(block.compute_dtype), block.n_heads * block.head_dim
    keys, scores = 2 * block.n_kv_heads * block.head_dim, 4 * block.n_heads * length
    rows, width = _hidden(block)
    matrices, merged = 3 if block.glu else 2, 0.0
    if isinstance(block.moe, SoftConfig):
        merged = size * matrices * block.d_model * width * segment_slots(block.moe, length) / length
    if remat == "full":
        return size * block.d_model
    if remat == "none":
        copies = rows * block.d_model if isinstance(block.moe, SparseConfig) else 0
        return size * (4 * block.d_model + 2 * heads + keys + copies + matrices * rows * width) + scores + merged
    products = 3 * block.d_model + heads + keys + (matrices - 1) * rows * width
    return merged + (size * products if remat == "dots_no_batch" else size * (products + heads) + scores)


def _hidden(block: BlockConfig) -> tuple[int, int]:
    """How many hidden rows a token has in the feed-forward part, and their width."""
    if block.moe is None:
        return 1, block.d_ff
    experts = block.moe.n_experts if isinstance(block.moe, DenseConfig) else block.moe.k
    return experts + block.moe.n_shared_experts, block.moe.d_ff


def logit_bytes(config: ModelConfig, tokens: int) -> tuple[int, int]:
    """Float32 logits of so many tokens: whole, and the chunk of them that is ever in memory."""
    whole = 4 * tokens * config.padded_vocab_size
    return whole, min(whole, 4 * max(CHUNK_SIZE, config.padded_vocab_size))
