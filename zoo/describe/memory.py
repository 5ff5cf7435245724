"""Bytes: of training under ZeRO or on a mesh, of activations, of the cache of keys and values."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from zoo.config import BlockConfig, DenseConfig, MeshConfig, ModelConfig, Remat, SoftConfig, SparseConfig
from zoo.describe.parameters import blocks_of
from zoo.describe.question import Question
from zoo.layers.logical import ParamSpec, is_spec
from zoo.layers.moe.soft import segment_slots
from zoo.objectives import CHUNK_SIZE
from zoo.parallel.rules import device_bytes, grad_shardings, optimizer_shardings, param_shardings

# Rows and columns from which Adafactor keeps their mean squares instead of every entry's.
FACTORED_FROM = 128
# The optimizers' moments, which are float32, in bytes.
MOMENTS = {
    "adamw": "8 N",
    "muon": "(8 N - 4 N of matrices)",
    "lion": "4 N",
    "adafactor": f"4 (rows + columns of matrices from {FACTORED_FROM} x {FACTORED_FROM} on, else N)",
}


class TrainingState(NamedTuple):
    """Bytes of one device's part of the training state: weights, float32 gradients, moments."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)

    def split(self, zero: int, n_devices: int) -> "TrainingState":
        """What each of `n_devices` holds under ZeRO 0 (nothing is split) to 3 (arXiv 1910.02054, section 5)."""
        parts = zip(self, (zero >= 3, zero >= 2, zero >= 1), strict=True)
        return TrainingState(*(size / n_devices if is_split else size for size, is_split in parts))


def itemsize(dtype: str) -> int:
    """Bytes of a number."""
    return jnp.dtype(dtype).itemsize


def training_state(specs: Any, optimizer: str, ema: bool = False, mesh: MeshConfig | None = None) -> TrainingState:
    """The training state of a model, from its abstract tree, on one device.

    Weights are in their own dtype, gradients, moments and a running mean of the weights in float32; the mean counts,
    and is split, with the optimizer.

    Args:
        mesh: of which the device is one, with a size for every axis; None for a device alone.

    Raises:
        ConfigError: the mesh does not divide the model, as in parallel.rules.spec_for.
    """
    mesh = MeshConfig(data=1) if mesh is None else mesh
    devices = AbstractMesh(tuple(getattr(mesh, axis) for axis in mesh.axes), mesh.axes)
    wide = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), specs, is_leaf=is_spec)
    kept = (*moments(specs, optimizer), wide if ema else None)
    return TrainingState(
        device_bytes(specs, param_shardings(specs, devices, mesh.zero)),
        device_bytes(wide, grad_shardings(specs, devices, mesh.zero)),
        device_bytes(kept, optimizer_shardings(kept, specs, devices, mesh.zero)),
    )


class DeviceMemory(NamedTuple):
    """What a device holds in training, in bytes.

    Attributes:
        state: its part of the training state.
        activations: an estimate, without what the axis tensor of a mesh splits of them.
        logits: the chunk that is ever in memory.
        logits_whole: of all of its tokens, which are never made.
    """

    state: TrainingState
    activations: float
    logits: int
    logits_whole: int


def device_memory(config: ModelConfig, specs: Any, question: Question) -> DeviceMemory:
    """What a device of the mesh holds in training, or a device alone, with its sequences; as `training_state`."""
    rows, length = question.batch_size, question.length
    parts = 1 if question.mesh is None else question.mesh.context
    state = training_state(specs, question.optimizer, question.ema, question.mesh)
    whole, chunk = logit_bytes(config, rows, length, question.batch_parts)
    return DeviceMemory(state, activation_bytes_per_token(config, length) * rows * length / parts, chunk, whole)


def moments(specs: Any, optimizer: str) -> tuple[Any, ...]:
    """The float32 arrays of an optimizer, in trees of the parameters' structure, without its counters."""
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    found = [[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in _moments_of(leaf, optimizer)] for leaf in leaves]
    return tuple(structure.unflatten([arrays[i] if i < len(arrays) else None for arrays in found]) for i in range(3))


def _moments_of(spec: ParamSpec, optimizer: str) -> list[tuple[int, ...]]:
    """Adam has two as large as the parameter, Lion one; Muon one of each matrix, and Adam's two of all else."""
    if spec.role == "selection_bias":  # which no optimizer moves
        return []
    if optimizer == "adafactor":
        return _factored(spec)
    return [spec.shape] * (1 if optimizer == "lion" or (optimizer == "muon" and spec.role == "matrix") else 2)


def _factored(spec: ParamSpec) -> list[tuple[int, ...]]:
    """Adafactor's mean squares of rows, of columns and of all entries; those that a leaf is without are one number."""
    rest = tuple(axis for axis in spec.axes if axis != "layers")
    rows, columns = (spec.inputs, spec.outputs) if spec.inputs else ((), rest)
    if spec.role == "embedding":
        rows, columns = rest[:1], rest[1:]
    within = lambda axes: [n for a, n in zip(spec.axes, spec.shape, strict=True) if a in axes]  # noqa: E731
    without = lambda axes: tuple(n for a, n in zip(spec.axes, spec.shape, strict=True) if a not in axes)  # noqa: E731
    one = (*without(rows + columns), 1)
    if min(math.prod(within(rows)), math.prod(within(columns))) < FACTORED_FROM:
        return [one, one, spec.shape]
    return [without(columns), without(rows), one]


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Keys and values of one token in all layers, in the compute dtype: 2 K h bytes L."""
    return sum(2 * b.n_kv_heads * b.head_dim for b in blocks_of(config)) * itemsize(config.compute_dtype)


def kv_bytes_per_sequence(config: ModelConfig, length: int) -> int:
    """Keys and values of a sequence of `length` tokens; a window keeps no more than it is wide."""
    slots = sum(2 * b.n_kv_heads * b.head_dim * min(length, b.window or length) for b in blocks_of(config))
    return slots * itemsize(config.compute_dtype)


# What the backward pass keeps of a token: c bytes of the compute dtype for each number that a product or a norm reads,
# and attention's log sums in float32, from which its weights are made anew. A token has m rows of F hidden units and,
# in a sparse mixture, as many copies; an FFN has n matrices.
ACTIVATIONS = {
    "none": "L (c (4 D + 2 H h + 2 K h + m D + n m F) + 4 H)",
    "full": "L c D + one block's c (4 D + 2 H h + 2 K h + m D + n m F) + 4 H",
    "dots": "L c (3 D + H h + 2 K h + (n - 1) m F) + one block's",
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
    keys, log_sums = 2 * block.n_kv_heads * block.head_dim, 4 * block.n_heads
    rows, width = _hidden(block)
    matrices, merged = 3 if block.glu else 2, 0.0
    if isinstance(block.moe, SoftConfig):
        merged = size * matrices * block.d_model * width * segment_slots(block.moe, length) / length
    if remat == "full":
        return size * block.d_model
    if remat == "none":
        copies = rows * block.d_model if isinstance(block.moe, SparseConfig) else 0
        return size * (4 * block.d_model + 2 * heads + keys + copies + matrices * rows * width) + log_sums + merged
    products = 3 * block.d_model + heads + keys + (matrices - 1) * rows * width
    return merged + size * products


def _hidden(block: BlockConfig) -> tuple[int, int]:
    """How many hidden rows a token has in the feed-forward part, and their width."""
    if block.moe is None:
        return 1, block.d_ff
    experts = block.moe.n_experts if isinstance(block.moe, DenseConfig) else block.moe.k
    return experts + block.moe.n_shared_experts, block.moe.d_ff


def logit_bytes(config: ModelConfig, batch_size: int, length: int, parts: int = 1) -> tuple[int, int]:
    """Float32 logits of a device's sequences: whole, and the chunk of them that is ever in memory.

    Args:
        batch_size: sequences on the device.
        parts: among so many devices the batch is split; the size of a chunk is that of all of them together.
    """
    # As objectives._chunked: so many positions of every sequence, and at least one.
    positions = max(1, min(length, CHUNK_SIZE // (batch_size * parts * config.padded_vocab_size)))
    position = 4 * batch_size * config.padded_vocab_size
    return position * length, position * positions
