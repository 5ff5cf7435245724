"""The router: which experts serve a token, with which weights, and what to report about it.

Expert numbers run over the E experts and then over the null ones, which compute nothing. All is float32.
"""

from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Int

from zoo.config import BlockConfig, SparseConfig
from zoo.layers.initializers import table_init
from zoo.layers.logical import Initializer, declare

Score = Literal["softmax", "softmax_selected", "sigmoid"]
# The least deviation of the noise, as in the code of Shazeer et al. (tensor2tensor): it is divided by.
LEAST_DEVIATION = 0.01


class RoutingStats(NamedTuple):
    """What one mixture reports, in float32: sums over real tokens, so that batches and devices add.

    E counts null experts too. No field has a gradient but those that say so.

    Attributes:
        counts: [E] assignments per expert before any is dropped or sent elsewhere; in a dense or soft mixture the
            sum of the weights.
        prob_sum: [E] sum of the probabilities: the softmax over all experts, or sigmoids divided by their sum.
            Has a gradient.
        gate_sum: [E] sum of the weights that experts' outputs got, 0 where dropped. Has a gradient.
        tokens: [] real tokens.
        z_sum: [] sum of the squared logsumexp of the raw logits. Has a gradient.
        entropy_sum: [] sum of the entropy of the probabilities, in nats.
        dropped: [] assignments dropped for lack of capacity.
        load_sum: [E] sum of the probabilities of being chosen again under new noise (`smooth_load`), 0 where no loss
            weighs it. Has a gradient.
        group_tokens: [groups] tokens that chose any expert of a group.
        sequence_sum: [] sum of the balance losses of the rows, 0 where the loss is that of the batch. Has a gradient.
        sequences: [] rows with real tokens, 0 where the loss is that of the batch.
    """

    counts: Array
    prob_sum: Array
    gate_sum: Array
    tokens: Array
    z_sum: Array
    entropy_sum: Array
    dropped: Array
    load_sum: Array
    group_tokens: Array
    sequence_sum: Array
    sequences: Array


class Routing(NamedTuple):
    """What a router decides about every token.

    Attributes:
        indices: [*T, k] its experts, best first.
        weights: [*T, k] of their outputs; 0 for null experts.
        ranking: [*T, E] by which they were chosen; -inf for those that could not be.
    """

    indices: Array
    weights: Array
    ranking: Array


def router_logits(x: Float[Array, "*T D"], w: Float[Array, "D E"], noise: Array | None = None) -> Float[Array, "*T E"]:
    """Raw logits x W, in float32 from the input on, whatever the dtype of x.

    `noise` multiplies the router's own copy of x, so experts never see it (Switch, arXiv 2101.03961, 2.2).
    Full precision is asked for, since accelerators would else round the factors of the product to bfloat16.
    """
    x = x.astype(jnp.float32)
    x = x if noise is None else x * noise
    return jnp.matmul(x, w.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def score(logits: Float[Array, "*T E"], kind: Score) -> Float[Array, "*T E"]:
    """The softmax over all experts, or the sigmoid of each (DeepSeek-V3, arXiv 2412.19437, equation 15).

    A softmax over the selected experts is the one over all, divided by its sum over the selected: `weigh` does that.
    """
    return jax.nn.sigmoid(logits) if kind == "sigmoid" else jax.nn.softmax(logits)


def limit_to_groups(
    ranking: Float[Array, "*T E"], n_groups: int, top_groups: int, rule: Literal["max", "top2_sum"]
) -> Float[Array, "*T E"]:
    """The ranking with -inf outside of each token's best groups of neighbouring experts.

    A group is as good as its best expert ("max", DeepSeek-V2, arXiv 2405.04434, section 2.2.2), or as the sum of
    its two best ("top2_sum", DeepSeek-V3's code). Not 0: a ranking with a bias may be negative.
    """
    grouped = ranking.reshape(*ranking.shape[:-1], n_groups, -1)
    best = jnp.sum(jax.lax.top_k(grouped, 1 if rule == "max" else 2)[0], axis=-1)
    chosen = jax.nn.one_hot(jax.lax.top_k(best, top_groups)[1], n_groups).sum(axis=-2)
    return jnp.where(chosen[..., None] > 0, grouped, -jnp.inf).reshape(ranking.shape)


def select(
    scores: Float[Array, "*T E"], config: SparseConfig, selection_bias: Float[Array, "E"] | None = None
) -> tuple[Int[Array, "*T k"], Float[Array, "*T E"]]:
    """Each token's k best experts, best first and ties to the lower number, and the ranking that decided.

    Source of the bias, which decides who is chosen and nothing else: arXiv 2408.15664, equation 3.
    """
    ranking = jax.lax.stop_gradient(scores if selection_bias is None else scores + selection_bias)
    if config.top_groups is not None:
        ranking = limit_to_groups(ranking, config.n_groups, config.top_groups, config.group_score)
    return jax.lax.top_k(ranking, config.k)[1], ranking


def weigh(logits: Float[Array, "*T E"], indices: Int[Array, "*T k"], config: SparseConfig) -> Float[Array, "*T k"]:
    """The weights of the chosen experts' outputs: their scores, divided by their sum where the config says so.

    Null experts, and numbers that are no expert's, weigh 0 and are left out of the sum, as in AdaMoE's code for
    Mixtral (arXiv 2406.13233): the experts that compute share a weight of 1, unless there are none.
    """
    computes = indices < config.n_experts
    if config.renormalizes:
        chosen = jnp.take_along_axis(logits, indices, axis=-1, mode="clip")
        # In logarithms, so that scores which underflow still have their ratios.
        weights = _softmax_of(jax.nn.log_sigmoid(chosen) if config.score == "sigmoid" else chosen, computes)
    else:
        weights = jnp.take_along_axis(score(logits, config.score), indices, axis=-1, mode="clip")
    return config.routed_scale * jnp.where(computes, weights, 0)


def _softmax_of(x: Float[Array, "*T k"], some: Bool[Array, "*T k"]) -> Float[Array, "*T k"]:
    """The softmax over `some` of the numbers, 0 for the others, also where there are none."""
    highest = jax.lax.stop_gradient(jnp.max(jnp.where(some, x, -jnp.inf), axis=-1, keepdims=True))
    exponentials = jnp.where(some, jnp.exp(jnp.where(some, x - highest, 0)), 0)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    return exponentials / jnp.where(total == 0, 1, total)


def _comparable(
    logits: Float[Array, "*T E"], config: SparseConfig, selection_bias: Float[Array, "E"] | None
) -> Float[Array, "*T E"]:
    """What experts are compared by: scores where they are added to something, else their logarithms.

    Those have the same order, and still have it where scores underflow to 0 or round to 1.
    """
    added = config.top_groups is not None and config.group_score == "top2_sum"
    if selection_bias is not None or added:
        return score(logits, config.score)
    return jax.nn.log_sigmoid(logits) if config.score == "sigmoid" else jax.nn.log_softmax(logits)


def route(
    logits: Float[Array, "*T E"], config: SparseConfig, selection_bias: Float[Array, "E"] | None = None
) -> Routing:
    """Every token's experts and their weights, from its logits over experts and null experts."""
    indices, ranking = select(_comparable(logits, config, selection_bias), config, selection_bias)
    return Routing(indices, weigh(logits, indices, config), ranking)


def smooth_load(
    logits: Float[Array, "*T E"], noisy: Float[Array, "*T E"], deviation: Float[Array, "*T E"], top_k: int
) -> Float[Array, "*T E"]:
    """The probability of each expert to be chosen if its noise, and none of the others', were drawn again.

    P(x, i) = Phi((logit_i - the k-th highest noisy logit of the others) / deviation_i).

    Source: Shazeer et al., arXiv 1701.06538, equations 8 and 9.
    """
    if top_k == logits.shape[-1]:
        return jnp.ones_like(logits)
    highest = jax.lax.top_k(noisy, top_k + 1)[0]
    last, next_one = highest[..., -2:-1], highest[..., -1:]
    return norm.cdf((logits - jnp.where(noisy >= last, next_one, last)) / deviation)


def routing_stats(
    logits: Float[Array, "*T E"],
    tokens: Float[Array, "*T"],
    assignments: Float[Array, "*T E"],
    gates: Float[Array, "*T E"],
    dropped: Float[Array, ""] | float = 0.0,
    kind: Score = "softmax",
    n_groups: int = 1,
) -> RoutingStats:
    """Sums what the router did; the fields of losses that few have are 0.

    Args:
        logits: raw logits of each token, or of each group of tokens that share a routing.
        tokens: how many real tokens each stands for; 0 for padding.
        assignments: share of each token that went to each expert.
        gates: weight that each expert's output got.
        dropped: assignments dropped for lack of capacity.
        kind: of the scores; it decides what the probabilities are.
        n_groups: of experts.
    """
    log_probs = log_probabilities(logits, kind)
    probs = jnp.exp(log_probs)
    stop = jax.lax.stop_gradient
    total = lambda values: jnp.einsum("...e,...->e", values, tokens, precision=jax.lax.Precision.HIGHEST)  # noqa: E731
    in_group = assignments.reshape(*assignments.shape[:-1], n_groups, -1).sum(-1) > 0
    zero = jnp.zeros((), jnp.float32)
    return RoutingStats(
        counts=stop(total(assignments)),
        prob_sum=total(probs),
        gate_sum=total(gates),
        tokens=jnp.sum(tokens),
        z_sum=jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * tokens),
        entropy_sum=stop(-jnp.sum(jnp.sum(probs * log_probs, axis=-1) * tokens)),
        dropped=jnp.asarray(dropped, jnp.float32),
        load_sum=jnp.zeros(logits.shape[-1:], jnp.float32),
        group_tokens=stop(total(in_group.astype(jnp.float32))),
        sequence_sum=zero,
        sequences=zero,
    )


def log_probabilities(logits: Float[Array, "*T E"], kind: Score) -> Float[Array, "*T E"]:
    """Logarithms of the probabilities: of the softmax, or of sigmoids divided by their sum (DeepSeek-V3, eq. 19)."""
    return jax.nn.log_softmax(jax.nn.log_sigmoid(logits) if kind == "sigmoid" else logits)


class Router(nn.Module):
    """Holds the weight of `router_logits`; float32 whatever the model's dtypes.

    Attributes:
        block: of the initializer.
        n_experts: E.
    """

    block: BlockConfig
    n_experts: int

    @nn.compact
    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T E"]:
        return router_logits(x, _declare(self, "w", table_init(self.block), (x.shape[-1], self.n_experts)))


class Logits(NamedTuple):
    """What a sparse router computes of x, each [*T, E].

    Attributes:
        raw: without the noise of noisy top-k.
        noisy: those that decide; the raw ones but in training with noise.
        deviation: of that noise; None without it.
    """

    raw: Array
    noisy: Array
    deviation: Array | None


class SparseRouter(nn.Module):
    """Holds the parameters of a sparse mixture's router, all in float32.

    Training with jitter or noise needs the rng stream "router"; nothing else does.

    Attributes:
        config: which parameters there are.
        block: of the width and the initializer.
    """

    config: SparseConfig
    block: BlockConfig

    def setup(self):
        config, zeros = self.config, nn.initializers.zeros
        n_choices = config.n_experts + config.n_null_experts
        shape = (self.block.d_model, n_choices)
        # Null experts lie on no device, so with them the axis need not divide as that of experts must.
        axis = "choice" if config.n_null_experts else "expert"
        self.w = _declare(self, "w", table_init(self.block), shape, axis)
        # The authors start it at 0 too: some noise, and no signal.
        self.w_noise = _declare(self, "w_noise", zeros, shape, axis) if config.noisy_top_k else None
        of_choices = lambda name, role: declare(self, name, zeros, (n_choices,), (axis,), role, "float32")  # noqa: E731
        self.bias = of_choices("bias", "bias") if config.router_bias else None
        self.selection_bias = of_choices("selection_bias", "selection_bias") if config.selection_bias else None

    def __call__(self, x: Float[Array, "*T D"], deterministic: bool = True) -> tuple[Logits, Array | None]:
        """The logits, and the selection bias [E] where the router has one."""
        jitter = None
        if self.config.router_jitter and not deterministic:
            low, high = 1 - self.config.router_jitter, 1 + self.config.router_jitter
            jitter = jax.random.uniform(self.make_rng("router"), x.shape, jnp.float32, low, high)
        raw = router_logits(x, self.w, jitter)
        raw = raw if self.bias is None else raw + self.bias
        if self.w_noise is None or deterministic:
            return Logits(raw, raw, None), self.selection_bias
        return self._noisy(raw, router_logits(x, self.w_noise, jitter)), self.selection_bias

    def _noisy(self, raw: Float[Array, "*T E"], noise_logits: Float[Array, "*T E"]) -> Logits:
        """H(x) = x W + N(0, 1) softplus(x W_noise), Shazeer et al., arXiv 1701.06538, equation 4."""
        deviation = jax.nn.softplus(noise_logits) + LEAST_DEVIATION
        return Logits(raw, raw + deviation * jax.random.normal(self.make_rng("router"), raw.shape), deviation)


def _declare(module: nn.Module, name: str, init: Initializer, shape: tuple[int, int], axis: str = "expert") -> Array:
    return declare(module, name, init, shape, ("embed", axis), "router", "float32", ("embed",), (axis,))
