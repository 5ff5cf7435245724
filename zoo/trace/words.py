"""Formulas that several steps share."""

import numpy as np
from jax.typing import ArrayLike

from zoo.config import BlockConfig


def array(x: ArrayLike) -> np.ndarray:
    """The first row of a batch in float32, or whole numbers as they are."""
    x = np.asarray(x)[0]
    return x if np.issubdtype(x.dtype, np.integer) or x.dtype == bool else x.astype(np.float32)


def norm_formula(block: BlockConfig, of: str = "x") -> str:
    """The norm of a block, of the variable `of`."""
    gain = "(1 + g)" if block.norm_unit_offset else "g"
    bias = " + b" if block.norm_bias else ""
    if block.norm == "rmsnorm":
        return f"{of} / √(mean({of}²) + ε) · {gain}{bias}"
    return f"({of} − mean({of})) / √(var({of}) + ε) · {gain}{bias}"


def read_by(block: BlockConfig) -> str:
    """What a part of the block reads: the stream x, or n, which is the stream normed."""
    return "x" if block.norm_placement in ("post", "deepnorm") else "n"


def layer_formula(block: BlockConfig) -> str:
    """What a block does to the stream, in one line."""
    ffn = "ffn" if block.moe is None else "mixture"
    if block.parallel == "one_norm":
        return f"n = norm(x);  x ← x + attention(n) + {ffn}(n)"
    if block.parallel == "two_norms":
        return f"x ← x + attention(norm(x)) + {ffn}(norm'(x))"
    forms = {
        "pre": "x ← x + {}(norm(x))",
        "sandwich": "x ← x + norm({}(norm(x)))",
        "post": "x ← norm(x + {}(x))",
        "deepnorm": f"x ← norm({(2 * block.n_layers) ** 0.25:.3g} x + {{}}(x))",
    }
    return ";  ".join(forms[block.norm_placement].format(part) for part in ("attention", ffn))
