"""Who may see whom, as small hashable descriptions that combine with &, | and ~.

Each mask answers in three ways: `allows`, for any two positions, also inside kernels; `classify`, for whole blocks of
positions by interval arithmetic; and `picture`, for people. It knows positions only: documents and lengths are data,
and belong to the kernels.

Sparse Transformer's patterns (arXiv 1904.10509, section 4) are `Causal() & (Window(l - 1, 0) | Dilated(l))` (strided)
and `Causal() & (Chunked(l) | Summary(l, c))` (fixed); a prefix model's mask is `Causal() | Prefix(n)`.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import numpy as np

# Positions or bounds of them: integers, or arrays of NumPy or JAX whose shapes broadcast.
Positions = Any


class Block(NamedTuple):
    """What a mask says of a block of queries and keys.

    Attributes:
        some: whether a pair may be allowed; False only where none is.
        every: whether all are allowed; True only where they are.
    """

    some: Any
    every: Any


class Span(NamedTuple):
    """The positions from `first` to `last`, both included."""

    first: Any
    last: Any


class Mask:
    """The base of all masks."""

    def allows(self, query: Positions, key: Positions) -> Any:
        """Whether a query at position `query` sees a key at position `key`; bool, of their broadcast shape."""
        raise NotImplementedError

    def classify(self, queries: Span, keys: Span) -> Block:
        """What holds for all queries and keys of two spans, from their bounds alone."""
        raise NotImplementedError

    def __and__(self, other: "Mask") -> "Mask":
        return And((self, other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or((self, other))

    def __invert__(self) -> "Mask":
        return Not(self)


def _true(query: Positions, key: Positions) -> Any:
    return (query == query) & (key == key)


@dataclass(frozen=True)
class Full(Mask):
    """A query sees every key, as in attention to another sequence."""

    def allows(self, query: Positions, key: Positions) -> Any:
        return _true(query, key)

    def classify(self, queries: Span, keys: Span) -> Block:
        always = _true(queries.first, keys.first)
        return Block(always, always)


@dataclass(frozen=True)
class Window(Mask):
    """A query sees its own position and so many on either side.

    Attributes:
        left, right: keys before and after the query's own; None for all. A window of W keys is Window(W - 1, 0).
    """

    left: int | None
    right: int | None

    def __post_init__(self):
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None and value < 0:
                raise ValueError(f"Window.{name}={value} must be at least 0, or None for all positions")

    def allows(self, query: Positions, key: Positions) -> Any:
        seen = _true(query, key)
        seen = seen if self.left is None else seen & (query - key <= self.left)
        return seen if self.right is None else seen & (key - query <= self.right)

    def classify(self, queries: Span, keys: Span) -> Block:
        # Distances query - key in the block run from `near` to `far`.
        near, far = queries.first - keys.last, queries.last - keys.first
        some = every = _true(queries.first, keys.first)
        if self.left is not None:
            some, every = some & (near <= self.left), every & (far <= self.left)
        if self.right is not None:
            some, every = some & (far >= -self.right), every & (near >= -self.right)
        return Block(some, every)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees keys at its own and earlier positions.

    Attributes:
        window: only the last `window` positions, the query's own included (arXiv 2004.05150); None for all.
    """

    window: int | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"Causal.window={self.window} must be at least 1: it includes the query's own position")

    @property
    def _band(self) -> Window:
        return Window(None if self.window is None else self.window - 1, 0)

    def allows(self, query: Positions, key: Positions) -> Any:
        return self._band.allows(query, key)

    def classify(self, queries: Span, keys: Span) -> Block:
        return self._band.classify(queries, keys)


@dataclass(frozen=True)
class Shifted(Mask):
    """Another mask with the queries `offset` positions later: Shifted(Causal(), S - T) ends where the keys end."""

    mask: Mask
    offset: int

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.mask.allows(query + self.offset, key)

    def classify(self, queries: Span, keys: Span) -> Block:
        return self.mask.classify(Span(queries.first + self.offset, queries.last + self.offset), keys)


@dataclass(frozen=True)
class Dilated(Mask):
    """A query sees keys whose distance is a multiple of `step`; Longformer's dilation, with a window of its own."""

    step: int

    def __post_init__(self):
        _at_least_one(self, "step", self.step)

    def allows(self, query: Positions, key: Positions) -> Any:
        return (query - key) % self.step == 0

    def classify(self, queries: Span, keys: Span) -> Block:
        near, far = queries.first - keys.last, queries.last - keys.first
        multiple = far // self.step * self.step  # the largest that the block reaches
        return Block(multiple >= near, (near == far) & (multiple == far) | (self.step == 1))


@dataclass(frozen=True)
class Prefix(Mask):
    """Every query sees the first `length` keys."""

    length: int

    def allows(self, query: Positions, key: Positions) -> Any:
        return _true(query, key) & (key < self.length)

    def classify(self, queries: Span, keys: Span) -> Block:
        always = _true(queries.first, keys.first)
        return Block(always & (keys.first < self.length), always & (keys.last < self.length))


@dataclass(frozen=True)
class Global(Mask):
    """The first `count` tokens see all, and all see them (arXiv 2004.05150, section 3.1)."""

    count: int

    def allows(self, query: Positions, key: Positions) -> Any:
        return (query < self.count) | (key < self.count)

    def classify(self, queries: Span, keys: Span) -> Block:
        return Block(
            (queries.first < self.count) | (keys.first < self.count),
            (queries.last < self.count) | (keys.last < self.count),
        )


@dataclass(frozen=True)
class Chunked(Mask):
    """A query sees the keys of its own chunk of `size` positions (block-local attention)."""

    size: int

    def __post_init__(self):
        _at_least_one(self, "size", self.size)

    def allows(self, query: Positions, key: Positions) -> Any:
        return query // self.size == key // self.size

    def classify(self, queries: Span, keys: Span) -> Block:
        q, k = (Span(span.first // self.size, span.last // self.size) for span in (queries, keys))
        meet = (q.first <= k.last) & (k.first <= q.last)
        return Block(meet, (q.first == k.last) & (q.last == k.first))


@dataclass(frozen=True)
class Summary(Mask):
    """Every query sees the last `count` keys of every chunk of `size` (the fixed pattern's columns)."""

    size: int
    count: int

    def __post_init__(self):
        _at_least_one(self, "size", self.size)
        if not 0 <= self.count <= self.size:
            raise ValueError(f"Summary.count={self.count} must lie between 0 and size={self.size}")

    def allows(self, query: Positions, key: Positions) -> Any:
        return _true(query, key) & (key % self.size >= self.size - self.count)

    def classify(self, queries: Span, keys: Span) -> Block:
        always = _true(queries.first, keys.first)
        first, length = keys.first % self.size, keys.last - keys.first
        start = self.size - self.count  # of the columns, in a chunk
        some = (first + length >= start) & (self.count > 0)
        return Block(always & some, always & (first >= start) & (first + length < self.size))


@dataclass(frozen=True)
class RandomBlocks(Mask):
    """Every row of blocks sees `count` blocks at random among its own and the earlier ones (arXiv 2007.14062).

    Drawn without repetition, as a pure function of seed, layer, head and row: never of data, nor of the length.
    A row with no more than `count` blocks to choose from sees them all; of more than 65,536, the first are drawn from.

    Attributes:
        size: positions of a block.
    """

    size: int
    count: int
    seed: int = 0
    layer: int = 0
    head: int = 0
    # Rows that `classify` looks into; a block of queries that reaches over more is taken for live.
    _ROWS: ClassVar[int] = 8

    def __post_init__(self):
        _at_least_one(self, "size", self.size)

    def allows(self, query: Positions, key: Positions) -> Any:
        return self._chosen(query // self.size, lambda block: key // self.size == block)

    def classify(self, queries: Span, keys: Span) -> Block:
        first, last = keys.first // self.size, keys.last // self.size
        top, bottom = queries.first // self.size, queries.last // self.size
        rows = (top + i - (i - bottom + top) * (i > bottom - top) for i in range(self._ROWS))
        found = [self._chosen(row, lambda block: (first <= block) & (block <= last)) for row in rows]
        few = bottom - top < self._ROWS
        return Block(reduce(operator.or_, found) | ~few, reduce(operator.and_, found) & few & (first == last))

    def _chosen(self, row: Positions, meets: Callable[[Any], Any]) -> Any:
        """Whether one of the row's blocks `meets`: Floyd's sampling, which needs no list of what is left."""
        seen = meets(-1) & (row < 0)
        taken: list[Any] = []
        for j in range(self.count):
            last = row + 1 - self.count + j  # among the blocks 0 to `last` the j-th is drawn
            # 16 bits of the draw as a share of the blocks: a TPU has no division, and compiles one into many steps.
            share = (self._draw(row, j) >> np.uint32(16)) * _unsigned(last * (last > 0) + 1)
            block = _signed(share >> np.uint32(16))
            again = reduce(operator.or_, (block == other for other in taken), block < 0)
            block = block * ~again + last * again
            taken.append(block)
            seen = seen | ((last >= 0) & meets(block))
        return seen

    def _draw(self, row: Positions, j: int) -> Any:
        salt = 0
        for word in (self.seed, self.layer, self.head, j):
            salt = (salt * 0x9E3779B1 + word + 1) % 2**32
        return mixed(_unsigned(row) ^ np.uint32(salt))


def mixed(x: Any) -> Any:
    """A bijection of 32 bits in which every bit of x moves every bit of the result.

    Constants: "triple32", C. Wellons, "Prospecting for hash functions" (2018), of all known the least biased.
    """
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(14))


def _unsigned(x: Positions) -> Any:
    return x.astype(np.uint32) if hasattr(x, "astype") else np.asarray(x).astype(np.uint32)


def _signed(x: Any) -> Any:
    return x.astype(np.int32)


@dataclass(frozen=True)
class And(Mask):
    """What all masks allow."""

    masks: tuple[Mask, ...]

    def allows(self, query: Positions, key: Positions) -> Any:
        return reduce(operator.and_, (m.allows(query, key) for m in self.masks))

    def classify(self, queries: Span, keys: Span) -> Block:
        blocks = [m.classify(queries, keys) for m in self.masks]
        return Block(*(reduce(operator.and_, part) for part in zip(*blocks, strict=True)))


@dataclass(frozen=True)
class Or(Mask):
    """What any of the masks allows."""

    masks: tuple[Mask, ...]

    def allows(self, query: Positions, key: Positions) -> Any:
        return reduce(operator.or_, (m.allows(query, key) for m in self.masks))

    def classify(self, queries: Span, keys: Span) -> Block:
        blocks = [m.classify(queries, keys) for m in self.masks]
        return Block(*(reduce(operator.or_, part) for part in zip(*blocks, strict=True)))


@dataclass(frozen=True)
class Not(Mask):
    """What a mask does not allow."""

    mask: Mask

    def allows(self, query: Positions, key: Positions) -> Any:
        return ~self.mask.allows(query, key)

    def classify(self, queries: Span, keys: Span) -> Block:
        block = self.mask.classify(queries, keys)
        return Block(~block.every, ~block.some)


@dataclass(frozen=True)
class ByHead:
    """A mask for each of several equal groups of query heads, in order (Longformer's dilated heads).

    Attributes:
        masks: as many as there are groups; they divide the query heads.
    """

    masks: tuple[Mask, ...]


def head_masks(mask: Mask | ByHead) -> tuple[Mask, ...]:
    """The masks of the groups of heads: one, or those of a ByHead."""
    return mask.masks if isinstance(mask, ByHead) else (mask,)


def longformer(window: int, n_global: int = 0, dilations: tuple[int, ...] = (1,)) -> Mask | ByHead:
    """Longformer's decoder (arXiv 2004.05150, section 4.1): a causal window of `window` keys, and global tokens.

    Args:
        dilations: one for each group of heads; a group's window holds every dilation-th key.
    """
    masks = []
    for d in dilations:
        near = Window((window - 1) * d, 0)
        masks.append(Causal() & ((near if d == 1 else near & Dilated(d)) | Global(n_global)))
    return masks[0] if len(masks) == 1 else ByHead(tuple(masks))


def big_bird(
    block: int, n_heads: int, window: int = 3, n_global: int = 2, n_random: int = 3, seed: int = 0, layer: int = 0
) -> ByHead:
    """BigBird's decoder (arXiv 2007.14062, section 2): all sizes but `block` and `n_heads` in blocks of positions.

    Each head draws random blocks of its own; the window is the row's own block and the ones before it.
    """
    same = [Chunked(block)] + [Shifted(Chunked(block), -block * i) for i in range(1, window)]
    common = (Global(n_global * block), *same)
    random = (RandomBlocks(block, n_random, seed, layer, head) for head in range(n_heads))
    return ByHead(tuple(Causal() & Or((*common, blocks)) for blocks in random))


def dense(mask: Mask, n_queries: int, n_keys: int, offset: int = 0) -> np.ndarray:
    """The mask of T queries, from position `offset` on, and S keys as bools [T, S]."""
    return np.asarray(mask.allows(offset + np.arange(n_queries)[:, None], np.arange(n_keys)[None, :]))


def picture(mask: Mask, n_queries: int, n_keys: int, offset: int = 0) -> str:
    """The mask as text, a line for each query: █ where it sees a key, · where it does not."""
    return "\n".join("".join("·█"[int(seen)] for seen in row) for row in dense(mask, n_queries, n_keys, offset))


def _at_least_one(mask: Mask, name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{type(mask).__name__}.{name}={value} must be at least 1")
