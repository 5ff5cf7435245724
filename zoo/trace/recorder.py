"""Runs a model once and keeps what its parts take and give.

It is the model's own code that runs. Its hooks (attend, experts, constrain) and Flax's interceptors hand over the
arrays; only the scan over the repeats of a stage is replaced, by a loop over slices of the stacked parameters, since
inside a scan there are no numbers to look at.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.config import BlockConfig
from zoo.kernels.attention import attention, dense
from zoo.kernels.attention.problem import Operands, Settings
from zoo.kernels.block_map import Places
from zoo.layers.block import DecoderBlock
from zoo.layers.logical import Axes
from zoo.layers.moe import SoftMoE, sorted_experts
from zoo.models.decoder import Decoder, Pattern


class Call(NamedTuple):
    """One call of a part: its first argument, and what it gave."""

    x: Any
    result: Any


class Attended(NamedTuple):
    """What attention was called with, what it gave, and what lies between: scores, mask and weights [B, H, T, T]."""

    q: Array
    k: Array
    v: Array
    scores: Array
    visible: Array
    weights: Array
    out: Array


class Sent(NamedTuple):
    """Where a sparse mixture sent each token: experts [N, k], and the weights of their outputs [N, k]."""

    indices: Array
    weights: Array


@dataclass
class BlockRecord:
    """What happened in one block.

    Attributes:
        block: the block.
        calls: path of a part inside the block -> its call.
        attended: of its attention.
        sent: of its mixture, where that is sparse.
        hidden: [B, T, F] hidden units of its plain FFN.
    """

    block: BlockConfig
    calls: dict[str, Call] = field(default_factory=dict)
    attended: Any = None
    sent: Any = None
    hidden: Any = None


class Recorder:
    """Holds the records of one run; see `run`.

    Attributes:
        outside: path -> call, of the parts around the blocks.
        blocks: one record per layer, in the order of the layers.
    """

    def __init__(self):
        self.outside: dict[str, Call] = {}
        self.blocks: list[BlockRecord] = []
        self._open: BlockRecord | None = None

    def run(self, model: Decoder, params: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """The logits of `model.apply` at evaluation; afterwards the attributes are filled."""
        looped = _LoopedDecoder(model.config, self._constrain, self._experts, self._attend)

        def forward(params: Any, tokens: Array) -> Any:
            with nn.intercept_methods(self._intercept):
                logits = looped.apply({"params": params}, tokens).logits
            return logits, self.outside, [(r.calls, r.attended, r.sent, r.hidden) for r in self.blocks]

        # As one program: to compile every operation on its own takes longer.
        logits, self.outside, blocks = jax.jit(forward)(params, tokens)
        self.blocks = [BlockRecord(r.block, *arrays) for r, arrays in zip(self.blocks, blocks, strict=True)]
        return logits

    def _intercept(self, call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module, method = context.module, context.method_name
        is_merging = isinstance(module, SoftMoE) and method == "_logits"
        if method != "__call__" and not is_merging:
            return call(*args, **kwargs)
        if isinstance(module, DecoderBlock):
            return self._in_block(module.block, call, args, kwargs)
        result = call(*args, **kwargs)
        calls = self.outside if self._open is None else self._open.calls
        # Inside a block, the path begins with the block's own name.
        path = module.path if self._open is None else module.path[1:]
        calls["/".join(path) + ("/merging" if is_merging else "")] = Call(next(iter(args), None), result)
        return result

    def _in_block(self, block: BlockConfig, call: Any, args: Any, kwargs: Any) -> Any:
        self._open = BlockRecord(block)
        self.blocks.append(self._open)
        result = call(*args, **kwargs)
        self._open.calls["block"] = Call(args[0], result)
        self._open = None
        return result

    def _attend(self, q: Array, k: Array, v: Array, **settings: Any) -> Array:
        slopes = settings.get("alibi_slopes")
        slopes = None if slopes is None else jnp.broadcast_to(slopes, (len(q), q.shape[2]))
        operands = Operands(q, k, v, Places(*(settings[name] for name in Places._fields)), slopes)
        plain = Settings(settings["scale"], settings["mask"], settings["softcap"])
        scores, visible = dense.scores(operands, plain), dense.pairs(operands, plain)
        out, lse = attention(q, k, v, **settings, return_lse=True)
        weights = jnp.where(visible, jnp.exp(scores - lse[..., None]), 0)
        self._open.attended = Attended(q, k, v, scores, visible[:, 0], weights, out)
        return self._open.attended.out

    def _experts(self, x: Array, indices: Array, weights: Array, *rest: Any) -> Array:
        self._open.sent = Sent(indices, weights)
        return sorted_experts(x, indices, weights, *rest)

    def _constrain(self, x: Array, axes: Axes) -> Array:
        if self._open is not None and self._open.block.moe is None and axes == ("batch", "length", "mlp"):
            self._open.hidden = x
        return x


class _Looped(nn.Module):
    """A stage as its blocks one after the other, outside of a scan; parameters and results are the scanned ones'."""

    pattern: dict[str, Any]

    @nn.compact
    def __call__(self, x: Array, caches: None, *args: Any) -> tuple[Array, Any]:
        stacked = self.variables["params"]
        reports = []
        for i in range(jax.tree.leaves(stacked)[0].shape[0]):
            params = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
            x, report = Pattern(**self.pattern).apply({"params": params}, x, caches, *args)
            reports.append(report)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports)


class _LoopedDecoder(Decoder):
    """A decoder whose layers compute numbers, where a scan would trace them."""

    def _scanned(self, repeat: int) -> Any:
        del repeat
        return lambda *fields: _Looped(dict(zip(_PATTERN, fields, strict=True)))


_PATTERN = [f.name for f in dataclasses.fields(Pattern) if f.name not in ("parent", "name")]
