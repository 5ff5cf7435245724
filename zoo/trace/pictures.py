"""Small pictures of arrays as PNG data addresses, without a drawing library."""

import base64
import struct
import zlib

import numpy as np
from jaxtyping import Float, UInt8

# Red, green, blue; how opaque a cell is tells how large its number is, so they fit a light page and a dark one.
ACCENT, POSITIVE, NEGATIVE = (14, 138, 134), (38, 112, 200), (214, 96, 40)
# Wider arrays are cut off.
MAX_COLUMNS = 256


def shares(weights: Float[np.ndarray, "T S"]) -> str:
    """Numbers from 0 to 1 as cells whose opacity is their square root, so that small ones can be seen."""
    alpha = np.sqrt(np.clip(weights, 0, 1))
    return png(_coloured(np.broadcast_to(ACCENT, (*alpha.shape, 3)), alpha))


def signed(values: Float[np.ndarray, "T N"]) -> str:
    """Numbers of either sign, blue above and orange below 0; the largest few are fully opaque."""
    values = values[:, :MAX_COLUMNS]
    largest = np.quantile(np.abs(values), 0.98) or 1.0
    rgb = np.where(values[..., None] > 0, POSITIVE, NEGATIVE)
    return png(_coloured(rgb, np.clip(np.abs(values) / largest, 0, 1)))


def _coloured(rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return np.concatenate([rgb, np.round(255 * alpha)[..., None]], axis=-1).astype(np.uint8)


def png(rgba: UInt8[np.ndarray, "T N 4"]) -> str:
    """A `data:` address of the picture (PNG, ISO/IEC 15948: colour type 6, filter 0)."""
    height, width = rgba.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), rgba.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")
    data = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
