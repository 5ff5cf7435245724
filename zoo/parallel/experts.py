"""Expert parallelism: the experts of a sparse mixture, spread over the devices of a mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from zoo.config import ConfigError
from zoo.kernels.glu import HiddenUnits
from zoo.kernels.grouped_matmul import FFNParams
from zoo.layers.moe.experts import Share, most_rows, some_experts, sorted_experts
from zoo.parallel.exchange import Way, make_plan, send, send_back
from zoo.parallel.rules import BATCH_AXES, batch_parts

# What JAX calls the platforms that have `jax.lax.ragged_all_to_all`.
RAGGED_PLATFORMS = ("tpu", "gpu")

_PLACES = FFNParams(
    w_gate=PartitionSpec("expert", None, "tensor"),
    w_up=PartitionSpec("expert", None, "tensor"),
    w_down=PartitionSpec("expert", "tensor", None),
    b_gate=PartitionSpec("expert", "tensor"),
    b_up=PartitionSpec("expert", "tensor"),
    b_down=PartitionSpec("expert", None),
    beta=PartitionSpec("expert"),
)


@dataclasses.dataclass(frozen=True)
class MeshExperts:
    """The `Experts` of a mesh, the same in values and gradients as `sorted_experts` on one device; dropless.

    Tokens are split over data, fsdp and expert. Every device sends its own to the devices along `expert` that have
    their experts, and there they go through those experts, each device of `tensor` having its part of the hidden
    units; then the results go back and are added. exchange.py says how, and what memory that takes: n tokens a device
    and P parts of the experts, P n rows of the model's width. Equal for equal meshes, so a module may hold it.
    """

    mesh: Mesh

    def __call__(
        self,
        x: Float[Array, "N D"],
        indices: Int[Array, "N k"],
        weights: Float[Array, "N k"],
        params: FFNParams,
        hidden: HiddenUnits,
        share: Share | None = None,
    ) -> Float[Array, "N D"]:
        """y [N, D], as `sorted_experts`; tokens lie in batch order, so they split as rows of the batch do.

        Raises:
            ConfigError: where the experts or their hidden units do not divide among their devices.
        """
        if self.mesh.size == 1:
            return sorted_experts(x, indices, weights, params, hidden, share)
        self._check(params)
        n_tokens, n_experts = x.shape[0], params.w_up.shape[0]
        # A single prompt may be too short to split evenly: tokens without an expert fill it up.
        fill = -n_tokens % batch_parts(self.mesh)
        x, indices, weights = (jnp.pad(a, ((0, fill), (0, 0))) for a in (x, indices, weights))
        indices = jnp.where(jnp.arange(n_tokens + fill)[:, None] < n_tokens, indices, n_experts)

        def local(x: Array, indices: Array, weights: Array, params: FFNParams) -> Array:
            x, indices, weights = _differing((x, indices, weights), ("tensor",))
            params = _once(_differing(params, ("data", "fsdp")))
            y = _exchanged(x, indices, weights, params, hidden, share, self.mesh)
            # Each part of the hidden units adds its share, in float32 whatever the dtype.
            return jax.lax.psum(y.astype(jnp.float32), "tensor").astype(y.dtype)

        tokens = PartitionSpec(BATCH_AXES)
        of_params = (None if p is None else spec for p, spec in zip(params, _PLACES, strict=True))
        in_specs = (tokens, tokens, tokens, FFNParams(*of_params))
        mapped = jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=tokens)
        return mapped(x, indices, weights, params)[:n_tokens]

    def _check(self, params: FFNParams) -> None:
        sizes = (("expert", "n_experts", params.w_up.shape[0]), ("tensor", "d_ff", params.w_up.shape[2]))
        for axis, name, size in sizes:
            if size % self.mesh.shape[axis]:
                raise ConfigError(
                    f"mesh.{axis}={self.mesh.shape[axis]} does not divide model.moe.{name}={size}; "
                    f"choose a divisor of {size}"
                )


def _exchanged(
    x: Array,
    indices: Array,
    weights: Array,
    params: FFNParams,
    hidden: HiddenUnits,
    share: Share | None,
    mesh: Mesh,
) -> Array:
    """`sorted_experts` on one device of those along `expert`, with its own tokens and its own experts."""
    n_local, (n_tokens, top_k) = params.w_up.shape[0], indices.shape
    n_parts = mesh.shape["expert"]
    if n_parts == 1:
        return sorted_experts(x, indices, weights, params, hidden, share)
    n_rows = most_rows(n_tokens, top_k, n_local, share)
    ragged = mesh.devices.flat[0].platform in RAGGED_PLATFORMS
    way = Way("expert", min(n_tokens, n_rows), min(top_k, n_parts), ragged)
    plan = make_plan(jnp.any(indices[:, :, None] // n_local == jnp.arange(n_parts), axis=1), way)
    # Experts count from 1 on the way, since where nothing came there are zeros.
    choices = jnp.concatenate([weights.astype(jnp.float32), (indices + 1).astype(jnp.float32)], axis=1)
    choices = send(choices, plan, way._replace(ragged=False))  # small, so whole regions
    weights, indices = choices[:, :top_k], choices[:, top_k:].astype(jnp.int32) - 1
    first = jax.lax.axis_index("expert") * n_local
    y = some_experts(send(x, plan, way), indices, weights, params, hidden, first, n_parts * n_rows)
    return send_back(y, plan, way)


def _once(params: FFNParams) -> FFNParams:
    """The output's bias belongs to one of the parts of the hidden units, since their outputs are added."""
    if params.beta is not None:
        params = params._replace(beta=_differing(params.beta, ("tensor",)))
    if params.b_down is None:
        return params
    b_down = _differing(params.b_down, ("tensor",))
    return params._replace(b_down=jnp.where(jax.lax.axis_index("tensor") == 0, b_down, 0))


def _differing(tree: Any, axes: tuple[str, ...]) -> Any:
    """`tree`, the same along `axes`, declared to differ: so it fits what does, and its gradients are summed there."""
    return jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), tree) if axes else tree
