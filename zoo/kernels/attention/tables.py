"""Sizes of blocks, measured beforehand: nothing is tuned while a program runs."""

from typing import NamedTuple

from zoo.kernels.attention.problem import Operands, Settings


def block_sizes(device: str, operands: Operands, settings: Settings) -> tuple[int, int]:
    """(queries, keys) of a block: what the settings ask for, else the table's, and no more than there are."""
    T, S = operands.q.shape[1], operands.k.shape[1]
    q_block, kv_block = settings.blocks or (128, 128)
    return min(q_block, T), min(kv_block, S)


class GpuBlocks(NamedTuple):
    """How a Triton kernel is cut.

    Attributes:
        q, kv: queries and keys of a block.
        warps: of 32 threads, that share a block.
        stages: depth of the pipeline that fetches the other side's blocks; with 1 nothing is fetched ahead.
    """

    q: int
    kv: int
    warps: int
    stages: int


class GpuSizes(NamedTuple):
    """What the blocks depend on: lengths, widths, and bytes of a number."""

    T: int
    S: int
    h: int
    d: int
    itemsize: int


# Bytes of a number -> kernel -> (greatest width, sizes). In 2 bytes and widths to 256 these are the fastest on an
# H100 from 2k tokens on in the tuning records that the tokamax 0.0.17 package ships, but where the compiler for an
# H200 says that ours would spill registers: there the nearest that does not. The others are what fits without
# spilling. None is measured with these kernels: benchmarks/gpu_attention.py does.
_GPU_BLOCKS = {
    2: {
        "forward": (
            (64, GpuBlocks(64, 128, 4, 3)),
            (128, GpuBlocks(128, 128, 8, 3)),
            (256, GpuBlocks(128, 32, 8, 3)),
            (1024, GpuBlocks(64, 32, 8, 2)),
        ),
        "dkv": (
            (64, GpuBlocks(64, 64, 4, 3)),
            (128, GpuBlocks(64, 64, 8, 2)),
            (192, GpuBlocks(32, 64, 8, 2)),
            (256, GpuBlocks(16, 64, 8, 2)),
            (1024, GpuBlocks(16, 16, 8, 1)),
        ),
        "dq": (
            (64, GpuBlocks(64, 64, 4, 3)),
            (128, GpuBlocks(64, 64, 4, 2)),
            (256, GpuBlocks(64, 32, 8, 2)),
            (1024, GpuBlocks(32, 32, 8, 1)),
        ),
        "decode": ((128, GpuBlocks(64, 64, 4, 3)), (256, GpuBlocks(32, 64, 4, 2)), (1024, GpuBlocks(16, 32, 8, 2))),
    },
    4: {
        "forward": (
            (128, GpuBlocks(64, 32, 4, 2)),
            (256, GpuBlocks(32, 32, 4, 2)),
            (1024, GpuBlocks(16, 16, 8, 1)),
        ),
        "dkv": ((128, GpuBlocks(32, 32, 4, 2)), (1024, GpuBlocks(16, 16, 8, 1))),
        "dq": ((128, GpuBlocks(32, 32, 4, 2)), (1024, GpuBlocks(16, 16, 8, 1))),
        "decode": ((128, GpuBlocks(32, 32, 4, 2)), (1024, GpuBlocks(16, 32, 8, 1))),
    },
}
# KB of shared memory that a block may have, by words of the device's name (CUDA C++ programming guide, technical
# specifications by compute capability); what is not here has at least that of a consumer's card.
_SHARED_KB = dict.fromkeys(("H100", "H200", "GH200", "B200", "GB200", "B300", "GB300"), 227)
_SHARED_KB |= {"A100": 163, "A30": 163}
_LEAST_SHARED_KB = 99
# What a kernel needs beside its blocks, to turn the layout of one; the most that the compiler has asked for.
_SCRATCH_KB = {"forward": 2, "dkv": 16, "dq": 2, "decode": 2}


def gpu_blocks(kind: str, sizes: GpuSizes, kernel: str, asked: tuple[int, int] | None = None) -> GpuBlocks:
    """How to cut "forward", "dkv", "dq" or "decode": as asked, else the table's way that this device can hold.

    Blocks are no longer than the sequences are, in powers of two.
    """
    width = max(sizes.h, sizes.d)
    table = _GPU_BLOCKS[sizes.itemsize][kernel]
    found = next((blocks for most, blocks in table if width <= most), table[-1][1])
    if asked is not None:
        return found._replace(q=asked[0], kv=asked[1])
    T, S = (max(16, 1 << (n - 1).bit_length()) for n in (sizes.T, sizes.S))
    found = found._replace(q=min(found.q, T), kv=min(found.kv, S))
    while too_large(kind, sizes, kernel, found) and (smaller := _smaller(found)) != found:
        found = smaller
    return found


def too_large(kind: str, sizes: GpuSizes, kernel: str, blocks: GpuBlocks) -> str | None:
    """Why a device cannot hold a kernel's blocks, or None."""
    limit = next((_SHARED_KB[word] for word in kind.replace("-", " ").split() if word in _SHARED_KB), _LEAST_SHARED_KB)
    needed = _shared_kb(sizes, kernel, blocks)
    if needed <= limit:
        return None
    return (
        f"blocks of {blocks.q} queries and {blocks.kv} keys of widths {sizes.h} and {sizes.d} take {needed:.0f} KB of"
        f" shared memory in its kernel {kernel!r}, and {kind!r} has {limit}; ask for smaller blocks, or for none"
    )


def _shared_kb(sizes: GpuSizes, kernel: str, blocks: GpuBlocks) -> float:
    """Shared memory of a kernel: its own block and those of the other side that it fetches ahead."""
    h, d = sizes.h, sizes.d
    own = {"dkv": blocks.kv * (h + d), "dq": blocks.q * (h + d)}.get(kernel, blocks.q * h)
    other = (blocks.q if kernel == "dkv" else blocks.kv) * (h + d)
    ahead = max(min(blocks.stages, 2), blocks.stages - 1)
    return (own + ahead * other) * sizes.itemsize / 1024 + _SCRATCH_KB[kernel]


def _smaller(blocks: GpuBlocks) -> GpuBlocks:
    """The next smaller sizes: the longer side halved, and in the end nothing fetched ahead."""
    if max(blocks.q, blocks.kv) == 16:
        return blocks._replace(stages=1)
    longer = "q" if blocks.q >= blocks.kv else "kv"
    return blocks._replace(**{longer: getattr(blocks, longer) // 2})
