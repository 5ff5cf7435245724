"""The one place where attention gets its gradient: a forward and a backward backend, chosen apart."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.kernels.attention.dispatch import BACKENDS
from zoo.kernels.attention.problem import Gradients, Operands, Settings


@dataclass(frozen=True)
class Runner:
    """Runs the backends that the settings name; parallel/ has one that does so on every device of a mesh."""

    def forward(self, operands: Operands, settings: Settings) -> tuple[Array, Array]:
        """The output [B, T, H, d] and the log sums [B, H, T]."""
        return BACKENDS[settings.forward].forward(operands, settings)

    def backward(self, operands: Operands, settings: Settings, *results: Array) -> Gradients:
        """The gradients, from output, log sums, and the gradients of both."""
        return BACKENDS[settings.backward].backward(operands, settings, *results)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def attend(
    operands: Operands, settings: Settings, runner: Runner
) -> tuple[Float[Array, "B T H d"], Float[Array, "B H T"]]:
    """The output and the log sums; both have gradients."""
    return _folding(lambda operands: runner.forward(operands, settings))(operands)


def _forward(operands: Operands, settings: Settings, runner: Runner) -> tuple[Any, Any]:
    out, lse = attend(operands, settings, runner)
    return (out, lse), (operands, out, lse)


def _backward(settings: Settings, runner: Runner, residuals: Any, grads: Any) -> tuple[Operands]:
    run = _folding(lambda operands, *results: tuple(runner.backward(operands, settings, *results)))
    found = Gradients(*run(*residuals, *grads))
    return (Operands(found.q, found.k, found.v, None, found.slopes, found.bias, None),)


attend.defvjp(_forward, _backward)


def _folding(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with its batch as the place for what vmap maps over: kernels need no rule of their own."""
    folding = jax.custom_batching.custom_vmap(run)

    @folding.def_vmap
    def rule(size: int, batched: Any, *args: Any) -> tuple[Any, Any]:
        B = args[0].q.shape[int(batched[0].q)]

        def fold(x: Array, has_axis: bool) -> Array:
            x = x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            x = jnp.broadcast_to(x, (size, B, *x.shape[2:]))  # a bias may be the same for all of a batch
            return x.reshape(size * B, *x.shape[2:])

        results = folding(*jax.tree.map(fold, list(args), list(batched)))
        results = jax.tree.map(lambda x: x.reshape(size, B, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return folding
