"""Which backend computes attention: each says what it cannot do, and `auto` takes the first of a device that can."""

import logging
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from typing import NamedTuple

from zoo.kernels.attention import adapters, chunked, dense, pallas_gpu, pallas_tpu
from zoo.kernels.attention.problem import Operands, Settings
from zoo.kernels.target import Target, target

WAYS = ("forward", "backward")
_LOG = logging.getLogger(__name__)


class Backend(NamedTuple):
    """A way to compute attention.

    Attributes:
        forward, backward: as those of `dense`.
        refuses: (operands, settings, target, "forward" or "backward") -> why it cannot do that, or None if it can.
        partial: whether `backward` takes output and log sums of rows that see more keys than it is given, and so
            gives these keys' part of the gradient.
    """

    forward: Callable
    backward: Callable
    refuses: Callable[[Operands, Settings, Target, str], str | None]
    partial: bool


class Choice(NamedTuple):
    """A backend, and why those that were asked before it cannot: name -> reason."""

    name: str
    refused: dict[str, str]


def _anything(operands: Operands, settings: Settings, device: Target, direction: str) -> None:
    return None


BACKENDS = {
    "dense": Backend(dense.forward, dense.backward, _anything, partial=False),
    "chunked": Backend(chunked.forward, chunked.backward, _anything, partial=True),
    "pallas_gpu": Backend(pallas_gpu.forward, pallas_gpu.backward, pallas_gpu.refuses, partial=True),
    "pallas_tpu": Backend(pallas_tpu.forward, pallas_tpu.backward, pallas_tpu.refuses, partial=True),
    "cudnn": Backend(adapters.cudnn_forward, adapters.cudnn_backward, adapters.cudnn_refuses, partial=False),
    "splash": Backend(adapters.splash_forward, adapters.splash_backward, adapters.splash_refuses, partial=False),
}
# What `auto` asks, in this order.
ORDER = {"cpu": ("chunked",), "gpu": ("pallas_gpu", "chunked"), "tpu": ("pallas_tpu", "splash", "chunked")}
# Up to so many scores of a head, their plain form is the fastest everywhere.
FEW_SCORES = 128 * 128


def choose(name: str, operands: Operands, settings: Settings, direction: str) -> Choice:
    """The backend for "forward" or "backward".

    Raises:
        ValueError: there is no such backend, or it cannot do what is asked.
    """
    device = target()
    if name == "auto":
        return _first(operands, settings, device, direction)
    if name not in BACKENDS:
        near = get_close_matches(name, BACKENDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"attention: there is no backend {name!r}, choose auto or one of {', '.join(BACKENDS)}{hint}")
    reason = BACKENDS[name].refuses(operands, settings, device, direction)
    if reason:
        raise ValueError(f"attention: backend {name!r} cannot run {direction}: {reason}; backend='auto' steps aside")
    return Choice(name, {})


@cache
def _say_once(name: str, *refused: tuple[str, str]) -> None:
    """Says what is computed with instead of what the device does best, which nothing else shows."""
    for other, reason in refused:
        _LOG.warning("attention runs on %r: %r steps aside, because %s", name, other, reason)


def _first(operands: Operands, settings: Settings, device: Target, direction: str) -> Choice:
    T, S = operands.q.shape[1], operands.k.shape[1]
    if T == 1 or T * S <= FEW_SCORES:
        return Choice("dense", {})
    refused: dict[str, str] = {}
    for name in ORDER.get(device.platform, ORDER["cpu"]):
        reason = BACKENDS[name].refuses(operands, settings, device, direction)
        if reason is None:
            _say_once(name, *refused.items())
            return Choice(name, refused)
        refused[name] = reason
    raise AssertionError("chunked refuses nothing")
