"""The three mixtures of experts: sparse, dense and soft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zoo.config.section import ConfigError, Section, nearest


@dataclass(frozen=True)
class MixtureConfig(Section):
    """What the three mixtures of experts share.

    Attributes:
        n_experts: E, the number of routed experts.
        d_ff: F, the hidden width of one expert.
        n_shared_experts: experts that serve every token beside the routed ones, fused into one FFN.
        balance_weight: weight of the load-balancing loss (1.0 at perfect balance).
        z_weight: weight of the router z-loss, the mean squared logsumexp of the router logits.
    """

    n_experts: int = 8
    d_ff: int = 512
    n_shared_experts: int = 0
    balance_weight: float = 0.01
    z_weight: float = 0.001

    section: ClassVar[str] = "model.moe"
    kind: ClassVar[str]

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "n_experts", "d_ff")
        self.require_at_least(0, "n_shared_experts", "balance_weight", "z_weight")

    @property
    def causal(self) -> bool:
        """Whether no output depends on a later token."""
        return True

    @property
    def renormalizes(self) -> bool:
        """Whether the weights of a token's routed experts add to 1 by construction."""
        return True


@dataclass(frozen=True)
class SparseConfig(MixtureConfig):
    """Each token goes to its top-k experts.

    Attributes:
        top_k: k, experts per token.
        renormalize: divide the k chosen probabilities by their sum; None does so where top_k is more than 1.
        capacity_factor: None for dropless; else an expert takes at most ceil(factor k T / E) assignments
            of a sequence in training, in token order. Evaluation is always dropless.
        router_jitter: in training the router's input is multiplied by U(1 - jitter, 1 + jitter).
    """

    top_k: int = 2
    renormalize: bool | None = None
    capacity_factor: float | None = None
    router_jitter: float = 0.0

    kind: ClassVar[str] = "sparse"

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "top_k")
        self.require(self.top_k <= self.n_experts, "top_k", f"is more than {self.named('n_experts')}")
        self.require(
            self.capacity_factor is None or self.capacity_factor > 0,
            "capacity_factor",
            "must be positive, or None for dropless routing",
        )
        self.require_between(0, 0.99, "router_jitter")
        self.require(
            not (self.top_k == 1 and self.renormalizes and self.n_experts > 1),
            "top_k",
            f"with {self.named('renormalize')} makes every weight 1, and the router would get no gradient; "
            "set model.moe.renormalize to False, or leave it at None",
        )

    @property
    def renormalizes(self) -> bool:
        return self.top_k > 1 if self.renormalize is None else self.renormalize


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
    sizes = {name: getattr(config, name) for name in ("n_experts", "d_ff", "n_shared_experts")}
    return MIXTURES[kind](**sizes)
