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
from zoo.layers.moe.experts import sorted_experts
from zoo.parallel.rules import BATCH_AXES, rows_divide

# Each part of the experts, and each part of their hidden units, adds its share of a token's output.
_SUMMED = ("expert", "tensor")


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

    Every device sorts its own tokens and runs them through its own experts and its own part of their hidden
    units; then the results are added over the expert and tensor axes. Left to itself, the compiler would gather all
    tokens of the batch on every device, since a sort by expert looks like one over all of them.
    Equal for equal meshes, so a module may hold it.
    """

    mesh: Mesh

    def __call__(
        self,
        x: Float[Array, "N D"],
        indices: Int[Array, "N k"],
        weights: Float[Array, "N k"],
        params: FFNParams,
        hidden: HiddenUnits,
    ) -> Float[Array, "N D"]:
        """y [N, D], as `sorted_experts`; tokens lie in batch order, so they split over data and fsdp as rows do.

        Raises:
            ConfigError: where the experts or their hidden units do not divide among their devices.
        """
        if self.mesh.size == 1:
            return sorted_experts(x, indices, weights, params, hidden)
        self._check(params)
        # A single prompt may be too short to split; then every device runs all of it.
        split = BATCH_AXES if rows_divide(x.shape[0], self.mesh) else ()

        def local(x: Array, indices: Array, weights: Array, params: FFNParams) -> Array:
            x, indices, weights = _differing((x, indices, weights), _SUMMED)
            params = _once(_differing(params, split))
            first = jax.lax.axis_index("expert") * params.w_up.shape[0]
            y = sorted_experts(x, indices, weights, params, hidden, first)
            # Parts of a sum are added in float32 whatever their dtype.
            return jax.lax.psum(y.astype(jnp.float32), _SUMMED).astype(y.dtype)

        tokens = PartitionSpec(split or None)
        of_params = (None if p is None else spec for p, spec in zip(params, _PLACES, strict=True))
        in_specs = (tokens, tokens, tokens, FFNParams(*of_params))
        mapped = jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=tokens)
        return mapped(x, indices, weights, params)

    def _check(self, params: FFNParams) -> None:
        sizes = (("expert", "n_experts", params.w_up.shape[0]), ("tensor", "d_ff", params.w_up.shape[2]))
        for axis, name, size in sizes:
            if size % self.mesh.shape[axis]:
                raise ConfigError(
                    f"mesh.{axis}={self.mesh.shape[axis]} does not divide model.moe.{name}={size}; "
                    f"choose a divisor of {size}"
                )


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
