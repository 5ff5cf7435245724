"""Laws 6, 7, 9 and 11: loss and gradient do not depend on how they are computed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zoo.config import ConfigError, DenseConfig, MeshConfig, Mixture, as_mixture
from zoo.data.loader import Batch
from zoo.laws.case import Case, Finding, equal, equal_trees, worst
from zoo.models.decoder import Decoder
from zoo.parallel.attention import MeshAttention
from zoo.parallel.experts import MeshExperts
from zoo.parallel.mesh import make_mesh
from zoo.parallel.rules import make_constrain
from zoo.train.state import make_layout
from zoo.train.step import gradients

ONE_DEVICE = MeshConfig(data=1)
WAYS = {"unrolled": {"unroll": True}, "rematerialised": {"remat": "full"}, "keeping products": {"remat": "dots"}}


def accumulation(case: Case) -> Finding:
    """Micro-batches give the gradient of the whole batch, with unequal numbers of labels in them."""
    batch = _uneven_batch(case, 4)
    whole = _gradients(case, case.model, batch)
    return worst(
        [
            equal_trees(whole, _gradients(case, case.model, batch, micro_batches=n), f"in {n} micro-batches, gradients")
            for n in (2, 4)
        ]
    )


def sharding(case: Case) -> Finding:
    """Meshes of the devices at hand give the gradient of one device."""
    n_devices = jax.device_count()
    if n_devices == 1:
        return Finding(None, "not tried: there is one device")
    batch = _uneven_batch(case, n_devices)
    alone = _gradients(case, case.model, batch)
    findings, refused = [], 0
    for config in meshes(n_devices):
        name = " x ".join(f"{axis} {getattr(config, axis)}" for axis in config.axes if getattr(config, axis) > 1)
        try:
            split = _gradients(case, _on_mesh(case.model, config), batch, config)
        except ConfigError:  # a size that this mesh does not divide
            refused += 1
        else:
            findings.append(equal_trees(alone, split, f"on the mesh {name}, gradients"))
    if not findings:
        return Finding(None, f"not tried: no mesh of {n_devices} devices divides the model")
    found = worst(findings)
    return found._replace(detail=f"{found.detail} ({len(findings)} meshes; {refused} do not divide the model)")


def meshes(n_devices: int) -> list[MeshConfig]:
    """Meshes that use every axis; of 8 devices or a multiple also every pair of axes, and every stage of ZeRO."""
    if n_devices % 8:
        return [MeshConfig(**{"data": 1} | {axis: n_devices}) for axis in MeshConfig.axes]
    half, quarter = n_devices // 2, n_devices // 4
    return [
        MeshConfig(data=n_devices, zero=1),
        MeshConfig(data=2, expert=half, zero=2),
        MeshConfig(data=quarter, fsdp=2, tensor=2, zero=2),
        MeshConfig(data=1, fsdp=half, tensor=2, zero=3),
        MeshConfig(data=1, tensor=half, expert=2, zero=1),
        MeshConfig(data=1, tensor=2, context=half, zero=1),
        MeshConfig(data=1, fsdp=quarter, tensor=2, expert=2, zero=3),
    ]


def _on_mesh(model: Decoder, config: MeshConfig) -> Decoder:
    mesh = make_mesh(config)
    sparse = getattr(model.config.moe, "kind", None) == "sparse"
    return model.clone(
        constrain=make_constrain(mesh), experts=MeshExperts(mesh) if sparse else None, attend=MeshAttention(mesh)
    )


def compilation(case: Case) -> Finding:
    """Scanned, unrolled and rematerialised layers give the same gradient."""
    batch = _uneven_batch(case, 2)
    scanned = _gradients(case, _with(case.model, unroll=False, remat="none"), batch)
    return worst(
        [
            equal_trees(scanned, _gradients(case, _with(case.model, **fields), batch), f"{way}, gradients")
            for way, fields in WAYS.items()
        ]
    )


def equivalence(case: Case) -> Finding:
    """A mixture of identical experts is one FFN; a sparse mixture with k = E is the dense one."""
    moe = case.model.config.moe
    if moe is None:
        return Finding(None, "not tried: there is no mixture")
    findings = [Finding(None, "not tried: not every block is a mixture whose weights add to 1")]
    if moe.convex and all(b.moe for stage in case.model.config.expand() for b in stage.blocks):
        findings = [_identical_experts(case)]
    if _is_softmax_of_products(moe):
        findings.append(_all_experts(case))
    return worst(findings)


def _is_softmax_of_products(moe: Mixture) -> bool:
    """Whether a sparse mixture weighs its experts as a dense one would, were all of them chosen."""
    if moe.kind != "sparse":
        return False
    return moe.score != "sigmoid" and not moe.router_bias and not moe.n_null_experts and moe.routed_scale == 1


def _identical_experts(case: Case) -> Finding:
    """Sets every expert to the first, without shared ones; a plain FFN of its weights must agree."""
    moe = case.model.config.moe
    alone = {"n_shared_experts": 0, "shared_gate": False}
    if moe.kind == "sparse":
        alone |= {"top_k": moe.k, "shared_in_top_k": False}
    model = _with(case.model, moe=dataclasses.replace(moe, **alone))
    plain = _with(model, moe=None, d_ff=moe.d_ff)

    def same(path: Any, leaf: jax.Array) -> jax.Array:
        # [layers, experts, ...]
        return jnp.broadcast_to(leaf[:, :1], leaf.shape) if _is_expert(path) else leaf

    params = jax.tree_util.tree_map_with_path(same, _drop(case.params, "shared"))
    tokens = case.tokens(2)
    mixture = model.apply({"params": params}, tokens).logits
    single = plain.apply({"params": _plain(params)}, tokens).logits
    return equal(single, mixture, lambda at: f"with identical experts, the output at {list(at)} is not that of one FFN")


def _is_expert(path: Any) -> bool:
    names = [getattr(key, "key", None) for key in path]
    return names[-2] == "moe" and _of_experts(names[-1])


def _of_experts(name: str) -> bool:
    return name.startswith(("w_", "b_")) or name == "beta"


def _drop(tree: Any, name: str) -> Any:
    return {k: _drop(v, name) for k, v in tree.items() if k != name} if isinstance(tree, dict) else tree


def _plain(params: Any) -> Any:
    """The parameters of the model with a plain FFN in place of every mixture: its first expert."""
    if not isinstance(params, dict):
        return params
    plain = {name: _plain(value) for name, value in params.items() if name != "moe"}
    if "moe" in params:
        plain["ffn"] = {name: w[:, 0] for name, w in params["moe"].items() if _of_experts(name)}
    return plain


def _all_experts(case: Case) -> Finding:
    moe = case.model.config.moe
    chosen = {"top_k": moe.n_experts + moe.top_k - moe.k, "capacity_factor": None, "overflow": "drop"}
    ungrouped = {"n_groups": 1, "top_groups": None, "device_weight": 0.0, "communication_weight": 0.0}
    every = _with(case.model, moe=moe.changed(**chosen, **ungrouped))
    dense = _with(case.model, moe=as_mixture(moe, DenseConfig.kind))
    tokens = case.tokens(2)
    outputs = [model.apply({"params": case.params}, tokens).logits for model in (dense, every)]
    return equal(*outputs, lambda at: f"with k = E, the output at {list(at)} is not that of the dense mixture")


def _with(model: Decoder, **fields: Any) -> Decoder:
    return model.clone(config=dataclasses.replace(model.config, **fields))


def _uneven_batch(case: Case, rows: int) -> Batch:
    """Rows of two documents and ever more padding."""
    T = case.length
    return case.batch([[max(1, T // (i + 2)), max(1, T // (2 * i + 3))] for i in range(rows)])


def _gradients(
    case: Case, model: Decoder, batch: Batch, config: MeshConfig = ONE_DEVICE, micro_batches: int = 1
) -> Any:
    """The gradients of a training step on a mesh, as NumPy arrays."""
    n_devices = 1 if config is ONE_DEVICE else jax.device_count()
    mesh = make_mesh(config, jax.devices()[:n_devices])
    layout = make_layout(model.abstract_params(), optax.identity(), mesh, config.zero)

    def run(params: Any, batch: Batch) -> Any:
        return gradients(model, params, batch, jax.random.key(case.seed), micro_batches, layout)[0]

    with jax.set_mesh(mesh):
        run = jax.jit(run, in_shardings=(layout.state.params, layout.batch), out_shardings=layout.grads)
        return jax.tree.map(np.asarray, run(case.params, batch))
