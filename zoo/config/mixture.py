"""The three mixtures of experts: sparse, dense and soft."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from zoo.config.section import SET, ConfigError, Needs, Section, nearest


@dataclass(frozen=True)
class MixtureConfig(Section):
    """What the three mixtures of experts share.

    Attributes:
        n_experts: E, the number of routed experts.
        d_ff: F, the hidden width of one expert.
        n_shared_experts: experts that serve every token beside the routed ones, fused into one FFN.
        shared_gate: multiply the shared experts' output by sigmoid(x w), one number per token (Qwen1.5-MoE).
        balance_weight: weight of the load-balancing loss (1.0 at perfect balance).
        z_weight: weight of the router z-loss, the mean squared logsumexp of the router logits.
    """

    n_experts: int = 8
    d_ff: int = 512
    n_shared_experts: int = 0
    shared_gate: bool = False
    balance_weight: float = 0.01
    z_weight: float = 0.001

    section: ClassVar[str] = "model.moe"
    kind: ClassVar[str]

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "n_experts", "d_ff")
        self.require_at_least(0, "n_shared_experts", "balance_weight", "z_weight")
        self.require(
            not self.shared_gate or self.n_shared_experts > 0,
            "shared_gate",
            f"needs shared experts, not {self.named('n_shared_experts')}",
        )

    @property
    def causal(self) -> bool:
        """Whether no output depends on a later token."""
        return True

    def require_causal(self) -> None:
        """Raises ConfigError where an output depends on a later token; names the causal alternative."""

    @property
    def k(self) -> int:
        """Routed experts that a token is sent to; dense and soft mixtures share one token among all."""
        return 1

    @property
    def convex(self) -> bool:
        """Whether the weights of a token's routed experts add to 1 at evaluation."""
        return True


@dataclass(frozen=True)
class SparseConfig(MixtureConfig):
    """Each token goes to its top-k experts.

    Attributes:
        top_k: k, experts per token.
        shared_in_top_k: the shared experts count among the k, for constant compute (DeepSeekMoE, arXiv 2401.06066).
        score: from router logits to scores: the "softmax" over all experts, over the selected ones only
            ("softmax_selected", gpt-oss), or a "sigmoid" of each (DeepSeek-V3, arXiv 2412.19437).
        renormalize: divide the k chosen scores by their sum; None does so where more than one is chosen.
        routed_scale: multiplies the routed experts' output, never that of shared ones.
        router_bias: the router's logits have a bias.
        selection_bias: a bias per expert that decides who is chosen and not with which weight; moved once a step
            against the load, without a loss (arXiv 2408.15664).
        selection_bias_rate: how far a step moves it.
        n_groups: the experts stand in this many groups of neighbours (devices, in DeepSeek's losses).
        top_groups: a token's experts come from this many groups; None for all.
        group_score: of a group: its best score ("max", DeepSeek-V2) or the sum of its two best ("top2_sum", V3).
        n_null_experts: extra choices that compute nothing, so that a token uses fewer experts (AdaMoE,
            arXiv 2406.13233); they count among the k.
        router_jitter: in training the router's input is multiplied by U(1 - jitter, 1 + jitter).
        noisy_top_k: in training logits get normal noise of a learned deviation (Shazeer et al., arXiv 1701.06538).
        choice: each "token" takes its k best experts, or each "expert" its C best tokens (arXiv 2202.09368; not
            causal).
        capacity_factor: None for dropless; else an expert takes at most ceil(factor k T / E) assignments
            of a row in training, all of its documents together. Choices of null experts count in k, so they raise the
            limit, and are never dropped. Evaluation is always dropless, save with choice="expert", where None is 1.
        priority: who finds a place first: by "token", then choice; by "choice", then token; or by choice, then
            the tokens' highest "probability" (arXiv 2106.05974). Only the first is causal.
        overflow: an assignment without a place is dropped ("drop"), or goes to the token's next best expert with
            room ("reroute").
        balance_scope: the balance loss is that of the whole "batch", or the mean over each "sequence", which is a row
            of the batch: where documents are packed, all those of a window together.
        importance_weight: weight of the squared coefficient of variation of the experts' summed weights
            (arXiv 1701.06538, equation 7).
        load_weight: weight of that of the smooth load estimate (equation 11); needs noisy_top_k.
        device_weight: weight of DeepSeek's device-level loss over the groups (arXiv 2401.06066, equation 15).
        communication_weight: weight of DeepSeek's communication loss over the groups (arXiv 2405.04434).
    """

    top_k: int = 2
    shared_in_top_k: bool = False
    score: Literal["softmax", "softmax_selected", "sigmoid"] = "softmax"
    renormalize: bool | None = None
    routed_scale: float = 1.0
    router_bias: bool = False
    selection_bias: bool = False
    selection_bias_rate: float = 0.001
    n_groups: int = 1
    top_groups: int | None = None
    group_score: Literal["max", "top2_sum"] = "max"
    n_null_experts: int = 0
    router_jitter: float = 0.0
    noisy_top_k: bool = False
    choice: Literal["token", "expert"] = "token"
    capacity_factor: float | None = None
    priority: Literal["token", "choice", "probability"] = "token"
    overflow: Literal["drop", "reroute"] = "drop"
    balance_scope: Literal["batch", "sequence"] = "batch"
    importance_weight: float = 0.0
    load_weight: float = 0.0
    device_weight: float = 0.0
    communication_weight: float = 0.0

    kind: ClassVar[str] = "sparse"
    needs: ClassVar[Needs] = {
        "shared_in_top_k": ("n_shared_experts", SET),
        "selection_bias_rate": ("selection_bias", (True,)),
        "group_score": ("top_groups", SET),
    }

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "top_k", "n_groups", "top_groups")
        self.require_at_least(0, "n_null_experts", "selection_bias_rate", "importance_weight", "load_weight")
        self.require_at_least(0, "device_weight", "communication_weight")
        self.require(self.routed_scale > 0, "routed_scale", "must be positive")
        self.require_between(0, 0.99, "router_jitter")
        self._check_choice()
        self._check_groups()
        self._check_capacity()
        self._check_weights()

    def _check_choice(self):
        self.require(
            self.k >= 1, "top_k", f"leaves no routed expert beside {self.named('n_shared_experts')}; set a larger one"
        )
        # Among its k experts, a token shall find at least one that computes.
        self.require(self.k <= self.n_experts, "top_k", f"is more than {self.named('n_experts')}")
        if self.choice == "expert":
            for name in ("selection_bias", "n_null_experts", "noisy_top_k", "top_groups", "renormalize"):
                self.require(not getattr(self, name), name, "has no meaning where experts choose; leave it out")
            self.require(self.score == "softmax", "score", "must be 'softmax' where experts choose")

    def _check_groups(self):
        divides = self.n_experts % self.n_groups == 0
        self.require(divides, "n_groups", f"does not divide {self.named('n_experts')}")
        self.require(
            self.n_groups == 1 or self.n_null_experts == 0, "n_null_experts", "belong to no group; set n_groups to 1"
        )
        if self.top_groups is None:
            grouped = self.device_weight > 0 or self.communication_weight > 0
            self.require(
                self.n_groups == 1 or grouped,
                "n_groups",
                "needs top_groups, device_weight or communication_weight, which are not set; leave it at 1",
            )
            return
        size = self.n_experts // self.n_groups
        self.require(self.top_groups <= self.n_groups, "top_groups", f"is more than {self.named('n_groups')}")
        self.require(
            self.k <= self.top_groups * size,
            "top_k",
            f"is more than the {self.top_groups * size} experts of {self.named('top_groups')}",
        )
        self.require(
            self.group_score == "max" or size >= 2, "group_score", f"needs groups of 2 or more; they have {size}"
        )

    def _check_capacity(self):
        self.require(
            self.capacity_factor is None or self.capacity_factor > 0,
            "capacity_factor",
            "must be positive, or None for dropless routing",
        )
        for name, default in (("priority", "token"), ("overflow", "drop")):
            self.require(
                getattr(self, name) == default or (self.capacity_factor is not None and self.choice == "token"),
                name,
                "needs a capacity_factor, and tokens that choose",
            )
        self.require(
            self.overflow == "drop" or self.priority == "token",
            "overflow",
            f"cannot reroute by {self.named('priority')}",
        )

    def _check_weights(self):
        selected = self.score == "softmax_selected"
        remedy = "set model.moe.renormalize to False, or leave it at None"
        if selected:
            remedy = "set model.moe.score to 'softmax'"
        self.require(
            not selected or self.renormalize is not False,
            "renormalize",
            f"cannot be switched off with {self.named('score')}, whose weights add to 1",
        )
        self.require(
            not (self.k == 1 and self.renormalizes and self.n_experts + self.n_null_experts > 1),
            "top_k",
            f"with {self.named('score' if selected else 'renormalize')} makes every weight 1, and the router would get "
            f"no gradient; {remedy}",
        )
        self.require(
            self.load_weight == 0 or self.noisy_top_k,
            "load_weight",
            "needs model.moe.noisy_top_k=True: it is the noise's",
        )
        for name in ("selection_bias", "top_groups"):
            self.require(
                self.load_weight == 0 or not getattr(self, name),
                "load_weight",
                f"knows nothing of {self.named(name)}; leave one out",
            )
        for name in ("device_weight", "communication_weight"):
            self.require(
                getattr(self, name) == 0 or self.n_groups > 1, name, f"needs more groups than {self.named('n_groups')}"
            )

    @property
    def k(self) -> int:
        return self.top_k - (self.n_shared_experts if self.shared_in_top_k else 0)

    @property
    def renormalizes(self) -> bool:
        """Whether the chosen scores are divided by their sum."""
        if self.choice == "expert":
            return False
        if self.score == "softmax_selected":
            return True
        return self.k > 1 if self.renormalize is None else self.renormalize

    @property
    def convex(self) -> bool:
        return self.renormalizes and self.routed_scale == 1 and self.n_null_experts == 0

    @property
    def causal(self) -> bool:
        return self.choice == "token" and self.priority == "token"

    def require_causal(self) -> None:
        for name, causal in (("choice", "token"), ("priority", "token")):
            self.require(
                getattr(self, name) == causal,
                name,
                f"lets a token see later ones, so a decoder refuses it; set it to {causal!r}",
            )


@dataclass(frozen=True)
class DenseConfig(MixtureConfig):
    """Every token goes to every expert, weighted by the softmax over all of them."""

    balance_weight: float = 0.0

    kind: ClassVar[str] = "dense"


@dataclass(frozen=True)
class SoftConfig(MixtureConfig):
    """SMEAR (arXiv 2306.03745): the experts' parameters are merged, and one merged expert serves a segment.

    Attributes:
        segment_length: L, tokens per segment; a segment is routed by the mean of the one before it
            (arXiv 2405.03133), the first of a document by a learned prior. None merges once for the whole
            sequence from its own mean, as in the SMEAR paper: not causal, so decoders refuse it.
        max_documents: the most documents that one packed window may hold; the packer keeps to it.
    """

    balance_weight: float = 0.0
    segment_length: int | None = 64
    max_documents: int = 4

    kind: ClassVar[str] = "soft"

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "segment_length", "max_documents")

    @property
    def causal(self) -> bool:
        return self.segment_length is not None

    def require_causal(self) -> None:
        self.require(
            self.causal, "segment_length", "lets a token see later ones, so a decoder refuses it; set a length"
        )


Mixture = SparseConfig | DenseConfig | SoftConfig
MIXTURES: dict[str, type[MixtureConfig]] = {c.kind: c for c in (SparseConfig, DenseConfig, SoftConfig)}


def as_mixture(config: MixtureConfig | None, kind: str) -> Mixture | None:
    """The mixture `kind` ("sparse", "dense", "soft" or "none") with the sizes of `config`."""
    if kind == "none":
        return None
    if kind not in MIXTURES:
        raise ConfigError(f"mixture={kind!r} is not one of {', '.join(MIXTURES)}, none{nearest(kind, MIXTURES)}")
    if config is None or config.kind == kind:
        return config or MIXTURES[kind]()
    weights = ("balance_weight", "z_weight")
    shared = [f.name for f in dataclasses.fields(MixtureConfig) if f.name not in weights]
    return MIXTURES[kind](**{name: getattr(config, name) for name in shared})
