"""A decoder as flat, shared fields and a pattern of blocks; `expand` resolves it into stages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from zoo.config.mixture import Mixture
from zoo.config.section import Section

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "full", "dots", "dots_no_batch"]


@dataclass(frozen=True)
class Block(Section):
    """What one block of the pattern does otherwise than the model's shared fields say.

    Attributes:
        mixture: use the model's mixture of experts, where it has one; False for a plain FFN.
        window: attend to the last `window` tokens only, the token itself included; None for all.
    """

    mixture: bool = True
    window: int | None = None

    section: ClassVar[str] = "model.pattern"

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "window")


@dataclass(frozen=True)
class BlockConfig:
    """One block with every value resolved: what the layers read.

    Attributes: as in ModelConfig and Block; `moe` is None for a plain FFN of width `d_ff`.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    moe: Mixture | None
    window: int | None
    activation: Activation
    glu: bool
    qk_norm: bool
    rope_theta: float
    norm_eps: float
    dropout: float
    init_std: float
    zero_init_out: bool
    param_dtype: Dtype
    compute_dtype: Dtype


@dataclass(frozen=True)
class Stage:
    """A pattern of blocks, repeated `repeat` times and scanned."""

    repeat: int
    blocks: tuple[BlockConfig, ...]


@dataclass(frozen=True)
class ModelConfig(Section):
    """A decoder-only language model.

    Attributes:
        vocab_size: V; None takes it from the tokenizer.
        context_length: the longest sequence, in tokens, that the model is meant for.
        d_model: D, width of the residual stream.
        n_layers: L, number of blocks.
        n_heads: H, query heads.
        n_kv_heads: K, key and value heads, a divisor of H; None means H (multi-head), 1 is multi-query.
        head_dim: h, width of a head, even; None means D / H.
        d_ff: F, hidden width of a plain FFN; None means 8/3 D for a GLU and 4 D otherwise, up to a multiple of 32.
        moe: the mixture of experts, or None for plain FFNs.
        prefix: blocks before the pattern (DeepSeek's dense first layers).
        pattern: blocks repeated until there are n_layers of them.
        activation: of the FFN and of the experts.
        glu: gated FFN, down(act(gate(x)) * up(x)); otherwise down(act(up(x))).
        qk_norm: RMSNorm of each query and key head, before the rotation (arXiv 2302.05442).
        rope_theta: base of the rotary frequencies (arXiv 2104.09864).
        norm_eps: epsilon of RMSNorm.
        tie_embeddings: the head uses the embedding table.
        dropout: rate on the output of every attention and FFN, in training.
        init_std: standard deviation of the normal initializers.
        zero_init_out: start the output projections of attention and FFN at zero.
        param_dtype: of the parameters.
        compute_dtype: of the matrix products; norms, softmax, router and loss stay in float32.
        remat: what the backward pass computes again instead of keeping: nothing ("none"), the whole block
            ("full"), all but matrix products ("dots"), all but those without batch dimensions.
        unroll: compile every layer on its own instead of scanning: faster steps, longer compilation.
    """

    vocab_size: int | None = None
    context_length: int = 256
    d_model: int = 256
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int | None = None
    head_dim: int | None = None
    d_ff: int | None = None
    moe: Mixture | None = None
    prefix: tuple[Block, ...] = ()
    pattern: tuple[Block, ...] = (Block(),)
    activation: Activation = "silu"
    glu: bool = True
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    dropout: float = 0.0
    init_std: float = 0.02
    zero_init_out: bool = False
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    remat: Remat = "none"
    unroll: bool = False

    section: ClassVar[str] = "model"
    # These change speed and memory, never a parameter or a number that matters to a run.
    speed_fields: ClassVar[tuple[str, ...]] = ("remat", "unroll")

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "vocab_size", "context_length", "d_model", "n_layers", "n_heads")
        self.require_at_least(1, "n_kv_heads", "head_dim", "d_ff")
        self.require_at_least(0, "init_std")
        self.require_between(0, 0.99, "dropout")
        self.require(self.norm_eps > 0, "norm_eps", "must be positive")
        self.require(self.rope_theta > 0, "rope_theta", "must be positive")
        self.require(len(self.pattern) > 0, "pattern", "needs at least one block")
        self.require(len(self.prefix) <= self.n_layers, "prefix", f"is longer than {self.named('n_layers')}")
        self._check_heads()
        if self.moe is not None and not self.moe.causal:
            self.moe.require(
                False, "segment_length", "lets a token see later ones, so a decoder refuses it; set a length"
            )

    def _check_heads(self):
        kv_heads = self.n_kv_heads or self.n_heads
        self.require(self.n_heads % kv_heads == 0, "n_heads", f"is not a multiple of {self.named('n_kv_heads')}")
        self.require(
            self.head_dim is not None or self.d_model % self.n_heads == 0,
            "d_model",
            f"is not a multiple of {self.named('n_heads')}; set model.head_dim",
        )
        head_dim = self.head_dim or self.d_model // self.n_heads
        self.require(head_dim % 2 == 0, "head_dim", f"resolves to {head_dim}; rotary positions need an even width")

    def expand(self) -> tuple[Stage, ...]:
        """The stages of resolved blocks: the prefix, the whole repeats of the pattern, and what is left of it."""
        repeats, rest = divmod(self.n_layers - len(self.prefix), len(self.pattern))
        runs = [*_runs(self.prefix), (repeats, self.pattern), (1, self.pattern[:rest])]
        return tuple(Stage(n, tuple(map(self._resolve, blocks))) for n, blocks in runs if n and blocks)

    def _resolve(self, block: Block) -> BlockConfig:
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(BlockConfig) if hasattr(self, f.name)}
        width = 8 * self.d_model / 3 if self.glu else 4 * self.d_model
        return BlockConfig(
            **own
            | {
                "n_kv_heads": self.n_kv_heads or self.n_heads,
                "head_dim": self.head_dim or self.d_model // self.n_heads,
                "d_ff": self.d_ff or -int(-width // 32) * 32,
                "moe": self.moe if block.mixture else None,
                "window": block.window,
            }
        )


def _runs(blocks: tuple[Block, ...]) -> list[tuple[int, tuple[Block, ...]]]:
    """Equal neighbours joined: (a, a, b) -> [(2, (a,)), (1, (b,))]."""
    runs: list[tuple[int, tuple[Block, ...]]] = []
    for block in blocks:
        if runs and runs[-1][1] == (block,):
            runs[-1] = (runs[-1][0] + 1, (block,))
        else:
            runs.append((1, (block,)))
    return runs
