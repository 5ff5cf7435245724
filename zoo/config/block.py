"""One block of a decoder: what it does otherwise than its model, and all that its layers read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from zoo.config.mixture import Mixture
from zoo.config.position import RopeScaling
from zoo.config.section import Section

Activation = Literal["sigmoid", "relu", "relu2", "gelu", "gelu_tanh", "silu", "swish", "swish_learned"]
Dtype = Literal["float32", "bfloat16"]
Init = Literal["normal", "truncated_normal", "scaled_normal", "deepnorm"]
Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "post", "sandwich", "deepnorm"]
OutInit = Literal["same", "gpt2", "zero"]
Parallel = Literal["one_norm", "two_norms"]
Position = Literal["rope", "alibi", "sinusoidal", "learned", "none"]
Projection = Literal["q", "k", "v", "o"]
QKNorm = Literal["head", "full"]


@dataclass(frozen=True)
class Block(Section):
    """What one block of the pattern does otherwise than the model's shared fields say.

    Attributes:
        mixture: use the model's mixture of experts, where it has one; False for a plain FFN.
        window: attend to the last `window` tokens only, the token itself included; None for all.
        rope_theta: base of this block's rotary frequencies; None means the model's.
    """

    mixture: bool = True
    window: int | None = None
    rope_theta: float | None = None

    section: ClassVar[str] = "model.pattern"

    def __post_init__(self):
        super().__post_init__()
        # Positions are int32.
        self.require(self.window is None or self.window < 2**31, "window", "must be less than 2^31, or None for all")
        self.require_at_least(1, "window")
        self.require(self.rope_theta is None or self.rope_theta > 1, "rope_theta", "must be more than 1, or None")


@dataclass(frozen=True)
class BlockConfig:
    """One block with every value resolved: what the layers read.

    Attributes: as in ModelConfig and Block; `moe` is None for a plain FFN of width `d_ff`, `rotary_dim` is the
    even number of a head's components that turn, `attention_scale` multiplies the scores.
    """

    d_model: int
    n_layers: int
    context_length: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    moe: Mixture | None
    window: int | None
    attention_bias: tuple[Projection, ...]
    qk_norm: QKNorm | None
    attention_scale: float
    attention_softcap: float | None
    attention_sinks: bool
    position: Position
    rotary_dim: int
    rope_theta: float
    rope_interleaved: bool
    rope_scaling: RopeScaling | None
    activation: Activation
    swish_beta: float
    glu: bool
    glu_clamp: float | None
    ffn_bias: bool
    norm: Norm
    norm_eps: float
    norm_scale: bool
    norm_bias: bool
    norm_unit_offset: bool
    norm_placement: NormPlacement
    parallel: Parallel | None
    dropout: float
    attention_dropout: float
    init: Init
    init_std: float
    out_init: OutInit
    param_dtype: Dtype
    compute_dtype: Dtype


@dataclass(frozen=True)
class Stage:
    """A pattern of blocks, repeated `repeat` times and scanned."""

    repeat: int
    blocks: tuple[BlockConfig, ...]
