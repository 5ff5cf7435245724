"""Sizes of blocks, measured beforehand: nothing is tuned while a program runs."""

from zoo.kernels.attention.problem import Operands, Settings


def block_sizes(device: str, operands: Operands, settings: Settings) -> tuple[int, int]:
    """(queries, keys) of a block: what the settings ask for, else the table's, and no more than there are."""
    T, S = operands.q.shape[1], operands.k.shape[1]
    q_block, kv_block = settings.blocks or (128, 128)
    return min(q_block, T), min(kv_block, S)
