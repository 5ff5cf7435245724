"""One training step and one evaluation step: pure functions, compiled once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from zoo.config import Experiment, Mixture, SparseConfig
from zoo.data.loader import Batch
from zoo.layers.logical import ParamSpec, is_spec
from zoo.layers.moe.balance import loss_weights, moved_bias
from zoo.models.decoder import Decoder
from zoo.objectives import Sums, auxiliary_loss, auxiliary_losses, moe_layers, row_losses, sums, total_loss
from zoo.train.optimizer import keep
from zoo.train.schedule import factor
from zoo.train.state import Layout, TrainState, as_float32, step_key

Metrics = dict[str, Array]
Grads = PyTree[Any]


def make_train_step(
    model: Decoder, experiment: Experiment, optimizer: optax.GradientTransformationExtraArgs, layout: Layout
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`train_step(state, batch) -> (state, metrics)`; the state that goes in is used up (donated).

    The gradient is that of the mean cross entropy plus the auxiliary losses of the whole batch, however many
    micro-batches it is computed in. Where it, or the loss, is not finite, parameters, their running mean
    and optimizer keep every bit; only the counters move on. Metrics stay on the devices; `train/loss` is the cross
    entropy alone, `learning_rate` what this step used, `muon_learning_rate` what Muon used for its matrices.
    """
    settings, train = experiment.optimizer, experiment.train
    schedule, specs = factor(settings, train.steps), model.abstract_params()
    peaks = {"learning_rate": settings.learning_rate}
    if settings.name == "muon":
        peaks["muon_learning_rate"] = settings.muon_learning_rate

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = step_key(train.seed, state.step)
        grads, total = gradients(model, state.params, batch, key, train.micro_batches, layout)
        grads, norm = clip(grads, settings.clip_norm)
        metrics = measure(total, model) | {"train/grad_norm": norm}
        good = jnp.isfinite(norm) & jnp.isfinite(metrics["train/loss"])  # a norm is finite where every gradient is
        rate = schedule(state.step)
        params, opt_state = updated(state, grads, optimizer, rate, good)
        params = balanced(params, total.routing, model.config.moe)
        ema = mean_of(state.ema, params, settings.ema_decay, specs)
        params, ema = keep(good, (params, ema), (state.params, state.ema))
        state = counted(state, good)._replace(params=params, opt_state=opt_state, ema=ema)
        counters = {"skipped": state.skipped, "skipped_in_a_row": state.skipped_in_a_row}
        return state, metrics | counters | {name: rate * peak for name, peak in peaks.items()}

    shardings = {"in_shardings": (layout.state, layout.batch), "out_shardings": (layout.state, layout.whole)}
    return jax.jit(train_step, donate_argnums=0, **shardings)


def updated(
    state: TrainState,
    grads: Grads,
    optimizer: optax.GradientTransformationExtraArgs,
    rate: Float[Array, ""],
    good: Bool[Array, ""],
) -> tuple[PyTree[Any], PyTree[Any]]:
    """The parameters after an update at `rate` times the peak learning rate, and the optimizer's state.

    The state is the old one where the update is not `good`, the parameters are then of no use.
    """
    params = as_float32(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, params, good=good)
    return jax.tree.map(lambda old, p, u: (p - rate * u).astype(old.dtype), state.params, params, updates), opt_state


def mean_of(ema: PyTree[Any] | None, params: PyTree[Any], decay: float | None, specs: PyTree[Any]) -> PyTree[Any]:
    """The running mean after a step: decay * mean + (1 - decay) * parameters, from the initial parameters on.

    A selection bias, which is no result of the gradient, is taken as it is. None without a mean.
    """
    if ema is None:
        return None

    def step(spec: ParamSpec, mean: Array, p: Array) -> Array:
        p = p.astype(mean.dtype)
        return p if spec.role == "selection_bias" else decay * mean + (1 - decay) * p

    return jax.tree.map(step, specs, ema, params, is_leaf=is_spec)


def balanced(params: PyTree[Any], routing: Any, moe: Mixture | None) -> PyTree[Any]:
    """The parameters with every selection bias moved against the load of its experts (`moved_bias`).

    Args:
        routing: summed statistics of the whole batch, [stage][block].
    """
    if not isinstance(moe, SparseConfig) or not moe.selection_bias:
        return params

    def move(path: tuple[Any, ...], leaf: Array) -> Array:
        names = [key.key for key in path]
        if names[-1] != "selection_bias":
            return leaf
        stage, block = (int(name.split("_")[1]) for name in names[:2])  # stage_0, block_0
        counts = routing[stage][block].counts
        return moved_bias(leaf, counts, moe.selection_bias_rate, moe.n_experts)

    return jax.tree_util.tree_map_with_path(move, params)


def counted(state: TrainState, good: Bool[Array, ""]) -> TrainState:
    """The state with its counters after a step, whose update was left out where it was not `good`."""
    bad = 1 - good.astype(state.skipped.dtype)
    in_a_row = jnp.where(good, 0, state.skipped_in_a_row + 1)
    return state._replace(step=state.step + 1, skipped=state.skipped + bad, skipped_in_a_row=in_a_row)


def clip(grads: Grads, limit: float | None) -> tuple[Grads, Float[Array, ""]]:
    """Gradients scaled down to the global norm `limit` where they exceed it (arXiv 1211.5063), and their norm."""
    norm = optax.tree.norm(grads)
    if limit is None:
        return grads, norm
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, limit))
    return jax.tree.map(lambda g: g * scale, grads), norm


# ---------------------------------------------------------------------------------------- gradients


def gradients(
    model: Decoder, params: PyTree[Any], batch: Batch, key: Array, micro_batches: int, layout: Layout
) -> tuple[Grads, Sums]:
    """The float32 gradient of `total_loss` of the whole batch, and the batch's sums."""
    if micro_batches > 1:
        return _accumulated(model, params, _split(batch, micro_batches, layout), key, layout)

    def objective(params: Any) -> tuple[Array, Sums]:
        total = _sums(model, params, batch, key, 0)
        return total_loss(total, model.config), total

    grads, total = jax.grad(objective, has_aux=True)(params)
    return jax.lax.with_sharding_constraint(as_float32(grads), layout.grads), total


def _accumulated(model: Decoder, params: Any, parts: Batch, key: Array, layout: Layout) -> tuple[Grads, Sums]:
    """The same from micro-batches, leaves [n, B / n, T], at the memory of one.

    The mean and the auxiliary losses (products of sums) are not additive, but the sums are. So the objective
    is linearized around the sums S of the whole batch, which a first pass without gradients adds up where there
    is an auxiliary loss: its gradient is that of sum_m [loss_m + <weight * d auxiliary / d S, S_m>] / weight.
    """
    weigh = _auxiliary_cotangent(model, params, parts, key)

    def objective(params: Any, part: Batch, m: Array) -> tuple[Array, Sums]:
        total = _sums(model, params, part, key, m)
        return total.objective + _dot(weigh, total.routing), total

    def step(grads: Grads, part: tuple[Array, Batch]) -> tuple[Grads, Sums]:
        new, total = jax.grad(objective, has_aux=True)(params, part[1], part[0])
        grads = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), grads, new)
        return jax.lax.with_sharding_constraint(grads, layout.grads), total

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    zeros = jax.lax.with_sharding_constraint(zeros, layout.grads)
    grads, totals = jax.lax.scan(step, zeros, _numbered(parts))
    total = jax.tree.map(lambda x: x.sum(0), totals)
    return jax.tree.map(lambda g: g / jnp.maximum(total.weight, 1), grads), total


def _auxiliary_cotangent(model: Decoder, params: Any, parts: Batch, key: Array) -> Any:
    """weight * d auxiliary / d routing statistics at those of the whole batch; None without such a loss."""
    moe = model.config.moe
    if moe is None or not any(loss_weights(moe).values()):
        return None
    _, totals = jax.lax.scan(
        lambda _, part: (None, _sums(model, params, part[1], key, part[0])), None, _numbered(parts)
    )
    total = jax.tree.map(lambda x: x.sum(0), totals)
    slope = jax.grad(auxiliary_loss)(total.routing, model.config)
    return jax.tree.map(lambda c: c * jnp.maximum(total.weight, 1), slope)


def _sums(model: Decoder, params: Any, batch: Batch, key: Array, m: Int[Array, ""] | int) -> Sums:
    """The training sums of micro-batch `m`; its randomness is a function of the step's key and of m."""
    dropout, router = jax.random.split(jax.random.fold_in(key, m))
    return sums(model, params, batch, deterministic=False, rngs={"dropout": dropout, "router": router})


def _dot(cotangent: Any, routing: Any) -> Float[Array, ""]:
    if cotangent is None:
        return jnp.zeros(())
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, cotangent, routing)), jnp.zeros(()))


def _numbered(parts: Batch) -> tuple[Array, Batch]:
    return jnp.arange(len(parts.tokens)), parts


def _split(batch: Batch, n: int, layout: Layout) -> Batch:
    """Leaves [n, B / n, T]: micro-batch m takes every n-th row from m on, so each device keeps to its own rows."""
    sharding = NamedSharding(layout.batch.mesh, PartitionSpec(None, *layout.batch.spec))

    def split(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1), sharding)

    return jax.tree.map(split, batch)


# ------------------------------------------------------------------------------------------ metrics


def measure(total: Sums, model: Decoder) -> Metrics:
    """What a batch's sums say: loss (nats per token), unweighted auxiliary losses, and how the experts were used.

    Per MoE layer [L], or [L, E] for the load: `moe/load` share of the assignments, null experts' last; `moe/max_load`
    and `moe/min_load` of the experts that compute, as multiples of their mean load; `moe/null` and `moe/dropped` share
    of the assignments, the former where there are null experts; `moe/entropy` of the router in nats per token.
    """
    metrics = {"train/loss": total.loss / jnp.maximum(total.weight, 1), "train/tokens": total.weight}
    if model.config.logit_z_weight > 0:
        metrics["train/logit_z_loss"] = total.z / jnp.maximum(total.weight, 1)
    for name, value in auxiliary_losses(total.routing, model.config).items():
        metrics[f"train/{name}_loss"] = value
    layers = moe_layers(total.routing)
    if layers is None:
        return metrics
    assigned = jnp.maximum(layers.counts.sum(-1), 1)
    load = layers.counts / assigned[:, None]
    computing, null = jnp.split(load, [model.config.moe.n_experts], axis=1)
    mean = jnp.maximum(computing.mean(-1), 1e-9)
    if null.size:
        metrics["moe/null"] = null.sum(-1)
    return metrics | {
        "moe/load": load,
        "moe/max_load": computing.max(-1) / mean,
        "moe/min_load": computing.min(-1) / mean,
        "moe/dropped": layers.dropped / assigned,
        "moe/entropy": layers.entropy_sum / jnp.maximum(layers.tokens, 1),
    }


# --------------------------------------------------------------------------------------- evaluation


def make_eval_step(model: Decoder, layout: Layout) -> Callable[[PyTree[Any], Batch], tuple[Array, Array]]:
    """`eval_step(params, batch) -> (loss [B], labels [B])`: sums of every row, for the host to add in float64.

    Parameters are read where they lie: a running mean lies as the optimizer's state does.
    """

    def eval_step(params: PyTree[Any], batch: Batch) -> tuple[Array, Array]:
        return row_losses(model, params, batch)

    return jax.jit(eval_step, in_shardings=(None, layout.batch), out_shardings=layout.whole)
