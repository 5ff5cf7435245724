"""How the kernels of TPUs are cut, and whether a chip can hold them."""

from typing import NamedTuple

from zoo.kernels.attention.problem import Operands, PagedOperands, Settings

# Lengths of blocks are multiples of the lanes of a register, since rows of log sums lie along them.
LANES = 128
MB = 2**20


class TpuBlocks(NamedTuple):
    """How a kernel is cut.

    Attributes:
        q, kv: queries and keys of a block.
        part: of the side that the kernel goes through, so many at once are in one product.
    """

    q: int
    kv: int
    part: int


class Chip(NamedTuple):
    """What a kind of TPU has.

    Attributes:
        vmem: MB that a core computes in (jax/_src/pallas/mosaic/tpu_info.py).
        blocks: sizes to start from, for numbers of 2 bytes and widths to 256.
    """

    vmem: int
    blocks: TpuBlocks


# From the fastest blocks of JAX's splash attention for v5p, v6e and 7x in the records that the tokamax 0.0.17 package
# ships, with fewer queries on the last two, where a program would else take long to compile; a v5e has what a v5p has,
# and a v4 what it can hold. Unmeasured with these kernels.
_CHIPS = {
    "TPU v4": Chip(16, TpuBlocks(512, 512, 256)),
    "TPU v5 lite": Chip(128, TpuBlocks(1024, 1024, 256)),
    "TPU v5e": Chip(128, TpuBlocks(1024, 1024, 256)),
    "TPU v5": Chip(64, TpuBlocks(1024, 1024, 256)),
    "TPU v5p": Chip(64, TpuBlocks(1024, 1024, 256)),
    "TPU v6 lite": Chip(128, TpuBlocks(1024, 2048, 512)),
    "TPU v6e": Chip(128, TpuBlocks(1024, 2048, 512)),
    "TPU7x": Chip(64, TpuBlocks(1024, 2048, 512)),
}
KINDS = tuple(_CHIPS)
# What a kernel may take of VMEM: the rest is XLA's.
_SHARE = 0.75
# What XLA gives a kernel that asks for nothing.
_DEFAULT_MB = 16
# Arrays of a product's size that a kernel has at once, by what the compiler asks for.
_TILES = {"forward": 5, "dq": 7, "dkv": 7}
# All chips have 1 MB of memory for scalars; the compiler takes some of it.
SMEM_MB = 1.0
_LISTS_SHARE = 0.9


def tpu_blocks(kind: str, operands: Operands, settings: Settings, kernel: str) -> TpuBlocks:
    """The sizes for "forward", "dq" or "dkv": what the settings ask for, else the largest of the table that fit."""
    T, S = operands.q.shape[1], operands.k.shape[1]
    most = _largest(kind, operands)
    if settings.blocks is not None:
        return TpuBlocks(*settings.blocks, most.part)
    while True:
        blocks = TpuBlocks(_even(T, most.q), _even(S, most.kv), most.part)
        smaller = _halved(most, ("kv",) if most.kv > most.q else ("q",))
        if smaller == most or not too_large(kind, operands, blocks, kernel):
            return blocks
        most = smaller


def _largest(kind: str, operands: Operands) -> TpuBlocks:
    """The table's blocks, smaller where a product is of more passes, or longer: compilers unroll it."""
    blocks = _CHIPS[kind].blocks
    if operands.q.dtype.itemsize == 4:
        blocks = _halved(blocks, ("q", "kv", "part"))
    return _halved(blocks, ("q", "kv")) if max(operands.q.shape[-1], operands.v.shape[-1]) > 256 else blocks


def too_large(kind: str, operands: Operands, blocks: TpuBlocks, kernel: str) -> str | None:
    """Why a chip cannot hold a kernel's blocks, or None."""
    has, needs = _CHIPS[kind].vmem * _SHARE, _vmem_mb(operands, blocks, kernel)
    if needs <= has:
        return None
    return (
        f"blocks of {blocks.q} queries and {blocks.kv} keys take {needs:.0f} MB in the kernel {kernel!r}, and a"
        f" kernel may have {has:.0f} MB of the VMEM of a {kind}; ask for smaller blocks, or for none"
    )


def lists_too_long(n: int) -> str | None:
    """Why n numbers of lists of live blocks cannot be held, or None."""
    needs = n * 4 / MB
    if needs <= SMEM_MB * _LISTS_SHARE:
        return None
    return (
        f"its lists of live blocks take {needs:.1f} MB, and a TPU has {SMEM_MB:.0f} MB of memory for scalars; ask for"
        " larger blocks"
    )


def vmem_limit(operands: Operands, blocks: TpuBlocks, kernel: str) -> int:
    """Bytes of VMEM for a kernel to ask for."""
    return int(max(_DEFAULT_MB, _vmem_mb(operands, blocks, kernel)) * MB)


def _vmem_mb(operands: Operands, blocks: TpuBlocks, kernel: str) -> float:
    """The memory of a kernel's blocks, each twice since the next one is fetched, of its sums, and of its products."""
    h, d = (-(-x.shape[-1] // LANES) * LANES for x in (operands.q, operands.v))
    own, other = (blocks.kv, blocks.q) if kernel == "dkv" else (blocks.q, blocks.kv)
    results = {"forward": d, "dq": h, "dkv": h + d}[kernel]
    inputs = (h if kernel == "forward" else h + d) * own + (h + d) * other
    moved = 2 * (inputs + results * own) * operands.q.dtype.itemsize
    sums = 4 * own * (results + 6 * LANES)
    tiles = _TILES[kernel] * 4 * own * min(blocks.part, other)
    bias = 0 if operands.bias is None else 2 * blocks.q * blocks.kv * operands.bias.dtype.itemsize
    return (moved + sums + tiles + bias) / MB


def _even(length: int, most: int) -> int:
    """The size of as few blocks as `most` allows, as little longer than the whole as can be."""
    n = -(-length // most)
    return -(-length // (n * LANES)) * LANES


def _halved(blocks: TpuBlocks, names: tuple[str, ...]) -> TpuBlocks:
    return blocks._replace(**{name: max(LANES, getattr(blocks, name) // 2) for name in names})


class TpuPages(NamedTuple):
    """How decoding goes through pages.

    Attributes:
        at_once: pages of a step.
        vmem_limit: bytes of VMEM to ask for.
        too_large: why a chip cannot hold them, or None.
    """

    at_once: int
    vmem_limit: int
    too_large: str | None


# Slots of the cache that a step of decoding fetches, and pages; unmeasured.
_SLOTS, _PAGES = 512, 16


def pages_at_once(kind: str, operands: PagedOperands) -> TpuPages:
    """As many pages as make a long transfer and fit."""
    page, n = operands.k_pages.shape[1], operands.page_table.shape[1]
    has = _CHIPS[kind].vmem * _SHARE
    for at_once in range(min(n, _PAGES, max(1, _SLOTS // page)), 0, -1):
        needs = _decode_mb(operands, at_once)
        if needs <= has:
            return TpuPages(at_once, int(max(_DEFAULT_MB, needs) * MB), None)
    reason = f"pages of {page} slots take {needs:.0f} MB, and a kernel may have {has:.0f} MB of the VMEM of a {kind}"
    return TpuPages(1, int(has * MB), f"{reason}; make pages smaller")


def _decode_mb(operands: PagedOperands, at_once: int) -> float:
    """The memory of pages, each twice since the next one is fetched, of sums, and of scores."""
    (_, H, h), (_, page, K, d) = operands.q.shape, operands.v_pages.shape
    h, d = (-(-n // LANES) * LANES for n in (h, d))
    lines = -(-page * K // LANES) * LANES
    moved = 2 * (at_once * lines + H) * (h + d) * operands.q.dtype.itemsize
    return (moved + H * (d + 4 * LANES) * 4 + at_once * (3 * H * lines * 4 + lines * d * 4)) / MB
