"""Attention on a mesh: rows and heads on their devices, and keys going round those that share a row."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from zoo.kernels.attention import attention
from zoo.kernels.attention.problem import Gradients, Operands, Settings
from zoo.kernels.attention.vjp import Runner
from zoo.kernels.block_map import Places
from zoo.parallel.ring import HERE, ring_backward, ring_forward
from zoo.parallel.rules import BATCH_AXES, batch_parts


@dataclass(frozen=True)
class MeshAttention:
    """The `attention` of a mesh, the same in values and gradients as on one device.

    Every device computes its own rows and its own heads. Left to itself, the compiler would gather all rows on every
    device, since a kernel, and a loop over rows, is one piece to it.
    Equal for equal meshes, so a module may hold it.
    """

    mesh: Mesh

    def __call__(self, q: Array, k: Array, v: Array, **settings: Any) -> Any:
        """As `attention`; positions and segment ids must be given where the mesh has a context axis."""
        if self.mesh.size == 1:
            return attention(q, k, v, **settings)
        return attention(q, k, v, **settings, runner=MeshRunner(self.mesh))


@dataclass(frozen=True)
class MeshRunner(Runner):
    """Runs the backends under `shard_map`, which their gradients are taken around: no collective is added to them."""

    mesh: Mesh

    def forward(self, operands: Operands, settings: Settings) -> tuple[Array, Array]:
        operands, specs = self._laid_out(operands)
        run = partial(self._forward, settings, specs.q[1])
        return self._mapped(run, (specs,), (specs.q, _of_sums(specs.q)))(operands)

    def backward(self, operands: Operands, settings: Settings, *results: Array) -> Gradients:
        own, specs = self._laid_out(operands)
        sums = _of_sums(specs.q)
        outs = Gradients(specs.q, specs.k, specs.v, specs.slopes, specs.bias)
        run = partial(self._backward, settings, specs.q[1], _not_on(specs.bias, specs.q))
        found = self._mapped(run, (specs, specs.q, sums, specs.q, sums), outs)(own, *results)
        return found._replace(k=_once(found.k, operands.k), v=_once(found.v, operands.v))

    def _mapped(self, run: Any, ins: Any, outs: Any) -> Any:
        return jax.shard_map(run, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)

    def _forward(self, settings: Settings, axis: str | None, operands: Operands) -> tuple[Array, Array]:
        return HERE.forward(operands, settings) if axis is None else ring_forward(operands, settings, axis)

    def _backward(
        self, settings: Settings, axis: str | None, shared: tuple[str, ...], operands: Operands, *results: Array
    ) -> Gradients:
        if axis is not None:
            return ring_backward(operands, settings, axis, *results)
        found = HERE.backward(operands, settings, *results)
        return found if found.bias is None else found._replace(bias=jax.lax.psum(found.bias, shared))

    def _laid_out(self, operands: Operands) -> tuple[Operands, Operands]:
        """The operands, with enough copies of key heads for all devices, and where each lies."""
        (B, T, H), (S, K) = operands.q.shape[:3], operands.k.shape[1:3]
        parts, rounds = self.mesh.shape["tensor"], self.mesh.shape["context"]
        rows = BATCH_AXES if B % batch_parts(self.mesh) == 0 else None
        length = "context" if rounds > 1 and T % rounds == 0 and S % rounds == 0 else None
        heads = "tensor" if H % parts == 0 and (K % parts == 0 or parts % K == 0) else None
        if heads and parts > K:
            k, v = (jnp.repeat(x, parts // K, axis=2) for x in (operands.k, operands.v))
            operands = operands._replace(k=k, v=v)
        tokens, ids, by_head = (
            PartitionSpec(rows, length, heads),
            PartitionSpec(rows, length),
            PartitionSpec(rows, heads),
        )
        return operands, Operands(
            *(tokens, tokens, tokens, Places(ids, ids, ids, ids)),
            slopes=None if operands.slopes is None else by_head,
            bias=None if operands.bias is None else _of_bias(operands.bias.shape, rows, heads),
            seeds=None if operands.seeds is None else by_head,
        )


def _of_sums(tokens: PartitionSpec) -> PartitionSpec:
    """Where log sums [B, H, T] lie, from where queries [B, T, H, h] do."""
    return PartitionSpec(tokens[0], tokens[2], tokens[1])


def _of_bias(shape: tuple[int, ...], rows: Any, heads: Any) -> PartitionSpec:
    """Where a bias lies: dimensions of 1 are whole."""
    return PartitionSpec(*(part if n > 1 else None for n, part in zip(shape[:2], (rows, heads), strict=True)))


def _not_on(bias: PartitionSpec | None, tokens: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes over which a bias is the same, though queries are not: its gradient is summed there."""
    whole = [] if bias is None else [on for own, on in zip(bias, (tokens[0], tokens[2]), strict=True) if own is None]
    return tuple(axis for on in whole if on for axis in ((on,) if isinstance(on, str) else on))


def _once(gradient: Array, x: Array) -> Array:
    """The gradient of key heads from those of their copies."""
    B, S, K, width = x.shape
    return gradient if gradient.shape == x.shape else gradient.reshape(B, S, K, -1, width).sum(3)
