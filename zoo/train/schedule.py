"""The learning rate over a run, as a share of its peak."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.config import OptimizerConfig

Step = int | Int[Array, ""]
Factor = Callable[[Step], Float[Array, ""]]


def factor(config: OptimizerConfig, steps: int) -> Factor:
    """The share of the peak rate that step t of T = `steps` uses, 0 <= t < T; outside, that of the nearest end.

    Warm-up: (t + 1) / W for t < W, so no update has rate 0. Then "cosine" (arXiv 1608.03983, eq. 5):
    min + (1 - min)(1 + cos(pi (t - W) / (T - W))) / 2; "linear": a straight line from 1 at W to min at T; "constant":
    1; or "wsd" (arXiv 2404.06395, section 4): 1, and over the last `decay_fraction` of the T steps a straight line
    to min. The last `final_decay_steps` go in a straight line from where the schedule stands to 0 at T, which is one
    step after the last update.
    """
    base = SCHEDULES[config.schedule](config, steps)
    final = steps - config.final_decay_steps

    def at(step: Step) -> Float[Array, ""]:
        t = jnp.clip(jnp.asarray(step), 0, steps).astype(jnp.float32)
        warm = (t + 1) / max(config.warmup_steps, 1)
        rate = jnp.where(t < config.warmup_steps, warm, base(jnp.minimum(t, final)))
        return rate * jnp.where(t > final, (steps - t) / max(config.final_decay_steps, 1), 1.0)

    return at


def _cosine(config: OptimizerConfig, steps: int) -> Factor:
    def at(t: Float[Array, ""]) -> Float[Array, ""]:
        progress = (t - config.warmup_steps) / max(steps - config.warmup_steps, 1)
        share = (1 + jnp.cos(jnp.pi * progress)) / 2
        return share + (1 - share) * config.min_ratio  # exactly 1 and exactly min at the ends

    return at


def _wsd(config: OptimizerConfig, steps: int) -> Factor:
    length = min(round(config.decay_fraction * steps), steps - config.warmup_steps)

    def at(t: Float[Array, ""]) -> Float[Array, ""]:
        share = jnp.minimum((steps - t) / max(length, 1), 1.0)
        return share + (1 - share) * config.min_ratio

    return at if length else lambda t: jnp.ones((), jnp.float32)


def _linear(config: OptimizerConfig, steps: int) -> Factor:
    def at(t: Float[Array, ""]) -> Float[Array, ""]:
        share = (steps - t) / max(steps - config.warmup_steps, 1)
        return share + (1 - share) * config.min_ratio

    return at


def _constant(config: OptimizerConfig, steps: int) -> Factor:
    del config, steps
    return lambda t: jnp.ones((), jnp.float32)


SCHEDULES = {"cosine": _cosine, "linear": _linear, "constant": _constant, "wsd": _wsd}
