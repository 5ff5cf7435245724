"""What the laws try: one model, random parameters, random documents, and how far numbers may lie apart."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from zoo.config import SoftConfig, SparseConfig
from zoo.data.loader import Batch
from zoo.models.decoder import Decoder
from zoo.objectives import Sums, sums

# Largest difference between two ways to the same float32 number, as a share of the largest such number.
TOLERANCE = 1e-5


class Finding(NamedTuple):
    """What a law found.

    Attributes:
        passed: None where the law does not apply to the model or the machine.
        detail: the counterexample, the largest difference, or why the law was not tried.
        distance: the largest difference, relative to the largest value.
    """

    passed: bool | None
    detail: str
    distance: float = 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in float32 with parameters that hide nothing, and the randomness of one run of the laws.

    Attributes:
        model: the model under test, computing in float32 and without dropout or noise in its routers.
        params: its parameters.
        length: T, tokens per row: enough to leave windows and segments behind.
        seed: of all random choices.
    """

    model: Decoder
    params: Any
    length: int
    seed: int

    def tokens(self, rows: int, salt: int = 0) -> Int[Array, "B T"]:
        """Random tokens."""
        key = jax.random.fold_in(jax.random.key(self.seed), salt)
        return jax.random.randint(key, (rows, self.length), 0, self.model.config.vocab_size, jnp.int32)

    @cached_property
    def logits(self) -> Callable[..., Array]:
        """Jitted: (tokens, positions=None, segment_ids=None) -> logits at evaluation."""
        return jax.jit(lambda *args: self.model.apply({"params": self.params}, *args).logits)

    @cached_property
    def sums(self) -> Callable[[Batch], Sums]:
        """Jitted: batch -> sums of loss and routing statistics at evaluation."""
        return jax.jit(lambda batch: sums(self.model, self.params, batch))

    @cached_property
    def max_documents(self) -> int:
        """Documents that a row may hold."""
        moe = self.model.config.moe
        return moe.max_documents if isinstance(moe, SoftConfig) else 3

    def batch(self, lengths: list[list[int]], salt: int = 0) -> Batch:
        """A batch of packed rows with documents of these lengths, the rest of each row padding."""
        tokens = self.tokens(len(lengths), salt)
        segments = np.zeros(tokens.shape, np.int32)
        positions = np.zeros(tokens.shape, np.int32)
        for row, documents in enumerate(lengths):
            starts = np.cumsum([0, *documents])
            for i, (start, end) in enumerate(itertools.pairwise(starts)):
                segments[row, start:end] = i + 1
                positions[row, start:end] = np.arange(end - start)
        follows = np.pad((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0), ((0, 0), (0, 1)))
        labels = jnp.where(follows, jnp.roll(tokens, -1, axis=1), -1)
        return Batch(tokens, labels, jnp.asarray(positions), jnp.asarray(segments))


def make_case(model: Decoder, params: Any, seed: int) -> Case:
    """A case for `model`; without `params`, random ones with noise on every leaf, so that no zero hides a fault."""
    moe = model.config.moe
    if isinstance(moe, SparseConfig):
        moe = dataclasses.replace(moe, router_jitter=0.0, noisy_top_k=False, load_weight=0.0)
    float32 = {"compute_dtype": "float32", "param_dtype": "float32"}
    still = float32 | {"dropout": 0.0, "attention_dropout": 0.0, "moe": moe}
    model = model.clone(config=dataclasses.replace(model.config, **still))
    if params is None:
        params = noisy(jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))["params"], seed)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    return Case(model, params, _length(model), seed)


def noisy(params: Any, seed: int, scale: float = 0.1) -> Any:
    """The parameters with normal noise on every leaf."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    return structure.unflatten(
        [leaf + scale * jax.random.normal(key, leaf.shape, leaf.dtype) for leaf, key in zip(leaves, keys, strict=True)]
    )


def _length(model: Decoder) -> int:
    """Three segments of a soft mixture and twice every window, if the context has room for them."""
    config = model.config
    windows = [block.window or 0 for block in (*config.prefix, *config.pattern)]
    segment = config.moe.segment_length if isinstance(config.moe, SoftConfig) else 0
    return min(config.context_length, max(24, 2 * max(windows) + 3, 3 * segment + 3))


def apart(a: ArrayLike, b: ArrayLike) -> tuple[float, tuple[int, ...]]:
    """The largest difference as a share of the largest number, and where it is; NaN is infinitely far."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    difference = np.nan_to_num(np.abs(a - b), nan=np.inf)
    if not difference.size:
        return 0.0, ()
    where = np.unravel_index(difference.argmax(), difference.shape)
    return float(difference[where] / max(np.nanmax(np.abs(a)), 1e-6)), tuple(int(i) for i in where)


def equal(a: ArrayLike, b: ArrayLike, describe: Callable[[tuple[int, ...]], str]) -> Finding:
    """Passes where a and b agree; else `describe(index of the largest difference)` is the counterexample."""
    distance, where = apart(a, b)
    if distance <= TOLERANCE:
        return Finding(True, f"largest difference {distance:.0e}", distance)
    return Finding(False, f"{describe(where)}, by {distance:.1e} of the largest value", distance)


def equal_trees(a: Any, b: Any, what: str) -> Finding:
    """`equal` over two trees of the same structure; names the leaf."""
    others = jax.tree.leaves(b)
    leaves = jax.tree_util.tree_leaves_with_path(a)
    findings = [
        equal(x, y, lambda where, path=path: f"{what} differ at {jax.tree_util.keystr(path)}{list(where)}")
        for (path, x), y in zip(leaves, others, strict=True)
    ]
    return worst(findings)


def worst(findings: list[Finding]) -> Finding:
    """The first failure, or else the finding with the largest difference."""
    failed = [f for f in findings if f.passed is False]
    return failed[0] if failed else max(findings, key=lambda f: f.distance)
