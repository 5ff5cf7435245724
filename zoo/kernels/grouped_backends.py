"""Which backend computes grouped products where, what each can do, and what inputs they all refuse.

| backend | runs on | by |
|---|---|---|
| sweep | all | grouped_matmul.py: blocks of a group's rows, one after the other; for CPUs |
| ragged_dot | all | grouped_ragged.py: XLA's own; native on TPUs, a dense expansion over the groups elsewhere |
| triton | NVIDIA GPUs from compute capability 8.0 on | grouped_triton.py: Pallas kernels |
| triton_interpreted | all | the same kernels, interpreted: their numbers without a GPU, slowly |

"auto" takes the sweep on CPUs, ragged_dot on TPUs, and on GPUs triton, or ragged_dot where triton refuses or where
the program that lowers for a GPU has none and sets no mesh that names one. For GPUs this rests on public figures, not
on a measurement of ours: XLA expands ragged_dot to every row times every group's matrix there (openxla/xla issue
45999). `benchmarks/grouped_matmul.py --only by` measures it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
from jaxtyping import Array

from zoo.kernels.grouped_products import Products
from zoo.kernels.grouped_ragged import RAGGED

Backend = Literal["auto", "sweep", "ragged_dot", "triton", "triton_interpreted"]


def _products(backend: str) -> Products:
    if backend == "ragged_dot":
        return RAGGED
    # Not above: importing Pallas takes half a second, and without a GPU nothing needs it.
    from zoo.kernels.grouped_triton import triton_products

    return triton_products(interpret=backend == "triton_interpreted")


def refusal(backend: str, platform: str, rows: Array, weights: Any) -> str | None:
    """Why `backend` cannot compute on a platform of JAX ("cpu", "tpu", "cuda"); None if it can.

    Args:
        rows: x [N, D].
        weights: a tree of arrays, of E groups.
    """
    if not backend.startswith("triton"):
        return None
    if rows.dtype.itemsize > 4:
        return f"has no products in {rows.dtype}"
    leaves = jax.tree.leaves(weights)
    largest = max(*(w.size for w in leaves), len(rows) * max(w.shape[-1] for w in leaves), rows.size)
    if largest >= 2**31:
        return f"counts elements in 32 bits, and an array has {largest}"
    if backend == "triton_interpreted":
        return None
    if platform != "cuda":
        return f"runs on NVIDIA GPUs, and this is a {platform}"
    old = [c for c in _compute_capabilities() if c < 8]
    return f"needs a compute capability of 8.0, and a GPU here has {old[0]}" if old else None


def _compute_capabilities() -> list[float]:
    """Of the GPUs of this process; none where it lowers for GPUs elsewhere."""
    return [float(d.compute_capability) for d in jax.local_devices() if hasattr(d, "compute_capability")]


def choose(backend: str, rows: Array, weights: Any, sweep: Callable, by_products: Callable) -> Callable:
    """The function that computes with `backend`; with "auto" the one of the platform that it is lowered for.

    The platform is asked for when the program is lowered, since a program may be lowered ahead of time for
    another platform than the one that traces it.

    Args:
        rows, weights: as of `refusal`.
        sweep: computes by the sweep.
        by_products: computes the same with the `Products` that are its first argument.

    Raises:
        ValueError: there is no such backend, or it cannot compute this here.
    """
    if backend == "auto":
        ragged = partial(by_products, RAGGED)
        gpu = (
            ragged if refusal("triton", target_platform(), rows, weights) else partial(by_products, _products("triton"))
        )
        return lambda *args: jax.lax.platform_dependent(*args, tpu=ragged, cuda=gpu, default=sweep)
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is not one of {', '.join(get_args(Backend))}")
    reason = refusal(backend, target_platform(), rows, weights)
    if reason:
        raise ValueError(f"backend={backend!r} {reason}; use 'auto', which picks by platform, or 'ragged_dot'")
    return sweep if backend == "sweep" else partial(by_products, _products(backend))


def target_platform() -> str:
    """The platform that a program traced here is most likely for: of the mesh that is set, or else JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "cuda" if platform == "gpu" else platform


def check_matmul(x: Array, w: Array, counts: Array) -> None:
    """Raises ValueError, naming sizes, where a grouped product of these is none: x [N, D], w [E, D, F], counts [E]."""
    _check("grouped_matmul: ", x.shape[1], {"w": w}, counts)


def check_ffn(x: Array, params: Any, counts: Array) -> None:
    """The same for a grouped network: x [N, D], counts [E], and `params`, an FFNParams."""
    width = params.w_up.shape[2]
    inner = {"w_gate": params.w_gate, "w_up": params.w_up}
    _check("grouped_ffn: ", x.shape[1], inner, counts)
    _check("grouped_ffn: ", width, {"w_down": params.w_down}, counts, "w_up's")
    if params.w_gate is not None and params.w_gate.shape[2] != width:
        raise ValueError(f"grouped_ffn: w_gate is {params.w_gate.shape[2]} wide and w_up {width}; give them one width")


def _check(where: str, width: int, weights: dict[str, Any], counts: Array, owner: str = "x's") -> None:
    for name, w in weights.items():
        if w is None:
            continue
        if counts.shape[0] != w.shape[0]:
            raise ValueError(
                f"{where}{counts.shape[0]} counts for the {w.shape[0]} groups of {name}; give one for each"
            )
        if w.shape[1] != width:
            raise ValueError(
                f"{where}{name} takes rows of {w.shape[1]}, but {owner} are {width} wide; give {name} {width}"
            )
