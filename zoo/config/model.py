"""A decoder as flat, shared fields and a pattern of blocks; `expand` resolves it into stages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from zoo.config.block import (
    Activation,
    Block,
    BlockConfig,
    Dtype,
    Init,
    Norm,
    NormPlacement,
    OutInit,
    Parallel,
    Position,
    Projection,
    QKNorm,
    Stage,
)
from zoo.config.mixture import Mixture
from zoo.config.position import LongRopeScaling, RopeScaling
from zoo.config.section import Needs, Section

Remat = Literal["none", "full", "dots", "dots_no_batch"]


@dataclass(frozen=True)
class ModelConfig(Section):
    """A decoder-only language model.

    Attributes:
        vocab_size: V; None takes it from the tokenizer.
        vocab_multiple: the tables are padded to a multiple of this many rows, so that they divide among devices;
            padded rows are never predicted.
        context_length: the longest sequence, in tokens, that the model is meant for.
        d_model: D, width of the residual stream.
        n_layers: L, number of blocks.
        n_heads: H, query heads.
        n_kv_heads: K, key and value heads, a divisor of H; None means H (multi-head), 1 is multi-query.
        head_dim: h, width of a head; None means D / H.
        d_ff: F, hidden width of a plain FFN; None means 8/3 D for a GLU and 4 D otherwise, up to a multiple of
            d_ff_multiple.
        d_ff_multiple: of a derived d_ff.
        moe: the mixture of experts, or None for plain FFNs; at least one of the n_layers has to have it.
        prefix: blocks before the pattern (DeepSeek's dense first layers).
        pattern: blocks repeated until there are n_layers of them.
        attention_bias: the projections of attention that have a bias, among q, k, v and o.
        qk_norm: the norm of queries and keys before the rotation, without a bias: of each head ("head",
            arXiv 2302.05442) or over all heads together ("full", OLMoE, arXiv 2409.02060).
        attention_scale: multiplies the scores; None means 1 / sqrt(head_dim).
        attention_softcap: c, scores become c tanh(score / c) before the mask (Gemma 2, arXiv 2408.00118).
        attention_sinks: a learned score per head that takes part in the softmax and has no value (gpt-oss,
            arXiv 2508.10925).
        position: rotary ("rope", arXiv 2104.09864), "alibi" (arXiv 2108.12409), "sinusoidal" (arXiv 1706.03762),
            a "learned" table, or "none".
        position_rows: rows of the learned table; None means context_length.
        position_offset: rows of the learned table ahead of those of positions (OPT has 2).
        rope_theta: base of the rotary frequencies.
        rope_fraction: the share of a head's components that turn, the first ones (GPT-NeoX has 0.25).
        rope_interleaved: turn neighbours (x_2i, x_2i+1) instead of (x_i, x_i+n/2).
        rope_scaling: how frequencies change for longer contexts; None leaves them.
        activation: of the FFN and of the experts; "swish" is x sigmoid(beta x), "silu" the same with beta 1,
            "swish_learned" learns beta, one number per FFN or expert.
        swish_beta: beta, or where it starts.
        glu: gated FFN, down(act(gate(x)) * up(x)); otherwise down(act(up(x))).
        glu_clamp: c, gpt-oss's form of a GLU: act(min(gate, c)) * (clip(up, -c, c) + 1); None for the plain one.
        ffn_bias: biases in the FFN and in the experts.
        norm: "rmsnorm" (arXiv 1910.07467) or "layernorm" (arXiv 1607.06450).
        norm_eps: added to the mean square or variance.
        norm_scale: a norm multiplies by a learned scale (OLMo's, arXiv 2402.00838, does not).
        norm_bias: a norm adds a bias.
        norm_unit_offset: a norm multiplies by 1 + scale, with scale starting at 0 (Gemma).
        norm_placement: "pre" x + f(norm(x)), "post" norm(x + f(x)), "sandwich" x + norm(f(norm(x))), or "deepnorm"
            norm(alpha x + f(x)) with alpha = (2 L)^(1/4) (arXiv 2203.00555).
        parallel: attention and FFN both read the block's input and are added together: behind "one_norm" (PaLM,
            Falcon-7B) or "two_norms" (GPT-NeoX); None for one after the other.
        embedding_scale: multiply embeddings by sqrt(D).
        embedding_norm: a norm right after the embedding (BLOOM).
        tie_embeddings: the head uses the embedding table.
        head_bias: the head adds a bias.
        logit_softcap: c, logits become c tanh(logit / c).
        logit_z_weight: weight of the mean squared logsumexp of the logits in the training loss (PaLM,
            arXiv 2204.02311, section 5).
        dropout: rate on the embedding and on the output of every attention and FFN, in training.
        attention_dropout: rate on the attention weights, in training.
        init: of matrices: "normal" and "truncated_normal" (at two deviations) of init_std, "scaled_normal" of
            1 / sqrt(inputs), "deepnorm": Xavier's with the gain (8 L)^(-1/4) on value, output and FFN weights.
        init_std: standard deviation of the initializers.
        out_init: the projections that write to the residual stream start like the others ("same"), at
            1 / sqrt(2 L) of that ("gpt2"), or at "zero".
        param_dtype: of the parameters.
        compute_dtype: of the matrix products; norms, softmax, router and loss stay in float32.
        remat: what the backward pass computes again instead of keeping: nothing ("none"), the whole block
            ("full"), all but matrix products ("dots"), all but those without batch dimensions.
        unroll: compile every layer on its own instead of scanning: faster steps, longer compilation.
    """

    vocab_size: int | None = None
    vocab_multiple: int = 1
    context_length: int = 256
    d_model: int = 256
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int | None = None
    head_dim: int | None = None
    d_ff: int | None = None
    d_ff_multiple: int = 32
    moe: Mixture | None = None
    prefix: tuple[Block, ...] = ()
    pattern: tuple[Block, ...] = (Block(),)
    attention_bias: tuple[Projection, ...] = ()
    qk_norm: QKNorm | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    position: Position = "rope"
    position_rows: int | None = None
    position_offset: int = 0
    rope_theta: float = 10_000.0
    rope_fraction: float = 1.0
    rope_interleaved: bool = False
    rope_scaling: RopeScaling | None = None
    activation: Activation = "silu"
    swish_beta: float = 1.0
    glu: bool = True
    glu_clamp: float | None = None
    ffn_bias: bool = False
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-6
    norm_scale: bool = True
    norm_bias: bool = False
    norm_unit_offset: bool = False
    norm_placement: NormPlacement = "pre"
    parallel: Parallel | None = None
    embedding_scale: bool = False
    embedding_norm: bool = False
    tie_embeddings: bool = True
    head_bias: bool = False
    logit_softcap: float | None = None
    logit_z_weight: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    init: Init = "normal"
    init_std: float = 0.02
    out_init: OutInit = "same"
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    remat: Remat = "none"
    unroll: bool = False

    section: ClassVar[str] = "model"
    needs: ClassVar[Needs] = {
        "d_ff_multiple": ("d_ff", (None,)),
        "position_rows": ("position", ("learned",)),
        "position_offset": ("position", ("learned",)),
        "rope_theta": ("position", ("rope",)),
        "rope_fraction": ("position", ("rope",)),
        "rope_interleaved": ("position", ("rope",)),
        "rope_scaling": ("position", ("rope",)),
        "glu_clamp": ("glu", (True,)),
        "norm_bias": ("norm_scale", (True,)),
        "norm_unit_offset": ("norm_scale", (True,)),
    }
    # These change speed and memory, never a parameter or a number that matters to a run.
    speed_fields: ClassVar[tuple[str, ...]] = ("remat", "unroll")

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "vocab_size", "vocab_multiple", "context_length", "d_model", "n_layers", "n_heads")
        self.require_at_least(1, "n_kv_heads", "head_dim", "d_ff", "d_ff_multiple", "position_rows")
        self.require_at_least(0, "init_std", "position_offset", "logit_z_weight")
        self.require_between(0, 0.99, "dropout", "attention_dropout")
        self.require(self.norm_eps > 0, "norm_eps", "must be positive")
        self.require(self.rope_theta > 1, "rope_theta", "must be more than 1")
        for name in ("attention_scale", "attention_softcap", "logit_softcap", "glu_clamp"):
            value = getattr(self, name)
            self.require(value is None or value > 0, name, "must be positive, or None")
        self.require(len(self.pattern) > 0, "pattern", "needs at least one block")
        self.require(len(self.prefix) <= self.n_layers, "prefix", f"is longer than {self.named('n_layers')}")
        self._check_heads()
        self._check_positions()
        self._check_parts()
        if self.moe is not None:
            self.moe.require_causal()
            self._check_mixture()

    def _check_heads(self):
        kv_heads = self.n_kv_heads or self.n_heads
        self.require(self.n_heads % kv_heads == 0, "n_heads", f"is not a multiple of {self.named('n_kv_heads')}")
        self.require(
            self.head_dim is not None or self.d_model % self.n_heads == 0,
            "d_model",
            f"is not a multiple of {self.named('n_heads')}; set model.head_dim",
        )
        repeated = len(set(self.attention_bias)) < len(self.attention_bias)
        self.require(not repeated, "attention_bias", "names a projection twice")

    def _check_mixture(self):
        first = next((i for i, block in enumerate(self.prefix + self.pattern, 1) if block.mixture), None)
        self.require(
            first is not None, "pattern", "has no block for model.moe; set mixture=True in one, or model.moe to None"
        )
        self.require(
            self.n_layers >= first,
            "n_layers",
            f"ends before block {first}, the first that has model.moe; set at least {first}, or model.moe to None",
        )

    def _check_positions(self):
        rotary = self.position == "rope"
        for block in self.prefix + self.pattern:
            block.require(
                rotary or block.rope_theta is None,
                "rope_theta",
                f"needs model.position='rope', not {self.named('position')}",
            )
        self.require(0 < self.rope_fraction <= 1, "rope_fraction", "must lie between 0, excluded, and 1")
        turning = self._rotary_dim
        self.require(
            not rotary or turning == 0 or turning % 2 == 0,
            "head_dim",
            f"gives {turning} components that turn; rotary positions need an even number",
        )
        self.require(not rotary or turning > 0, "rope_fraction", "leaves no component of a head that turns")
        self.require(
            self.position_rows is None or self.position_rows >= self.context_length,
            "position_rows",
            f"is less than {self.named('context_length')}; a position without a row has no meaning",
        )
        if isinstance(self.rope_scaling, LongRopeScaling):
            for name in ("short_factors", "long_factors"):
                given = len(getattr(self.rope_scaling, name))
                self.rope_scaling.require(
                    given == turning // 2, name, f"holds {given} divisors for {turning // 2} rotated pairs"
                )

    def _check_parts(self):
        self.require(
            self.swish_beta == 1 or self.activation.startswith("swish"),
            "swish_beta",
            f"needs activation 'swish' or 'swish_learned', not {self.named('activation')}",
        )
        self.require(
            self.parallel is None or self.norm_placement == "pre",
            "parallel",
            f"needs model.norm_placement='pre', not {self.named('norm_placement')}",
        )
        self.require(
            self.init != "deepnorm" or self.norm_placement == "deepnorm",
            "init",
            f"needs model.norm_placement='deepnorm', not {self.named('norm_placement')}",
        )
        self.require(
            self.init != "deepnorm" or self.out_init != "gpt2",
            "out_init",
            "scales down what model.init='deepnorm' has scaled already; choose one of them",
        )

    @property
    def _head_dim(self) -> int:
        return self.head_dim or self.d_model // self.n_heads

    @property
    def _rotary_dim(self) -> int:
        return int(self._head_dim * self.rope_fraction) if self.position == "rope" else 0

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: V up to a multiple of vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

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
                "head_dim": self._head_dim,
                "d_ff": self.d_ff or -int(-width // self.d_ff_multiple) * self.d_ff_multiple,
                "moe": self.moe if block.mixture else None,
                "window": block.window,
                "attention_scale": self.attention_scale or self._head_dim**-0.5,
                "rotary_dim": self._rotary_dim,
                "rope_theta": block.rope_theta or self.rope_theta,
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
