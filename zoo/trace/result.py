"""What a trace holds."""

import html
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from zoo.config import BlockConfig, ModelConfig


class Step(NamedTuple):
    """One array of the forward pass.

    Attributes:
        name: in words.
        axes: a letter for each dimension.
        formula: how it comes about.
        meaning: what it is for.
        value: the array.
    """

    name: str
    axes: tuple[str, ...]
    formula: str
    meaning: str
    value: np.ndarray

    @property
    def words(self) -> tuple[str, str, str]:
        """What need not be said of it twice."""
        return self.name, self.formula, self.meaning


class Looks(NamedTuple):
    """Where tokens look.

    Attributes:
        visible: [T, T] whether the token of a row may look at that of a column.
        weights: [H, T, T] how much it does, for each head; the rest to 1 of a row goes to the head's sink.
    """

    visible: Bool[np.ndarray, "T T"]
    weights: Float[np.ndarray, "H T T"]

    def strongest(self, head: int, token: int, n: int = 3) -> list[tuple[int, float]]:
        """The `n` tokens that `token` looks at most in a head, with their weights."""
        row = self.weights[head, token]
        best = np.argsort(-row, kind="stable")[:n]
        return [(int(i), float(row[i])) for i in best if self.visible[token, i]]

    def sink(self, head: int, token: int) -> float:
        """What a head's sink takes of `token`; 0 without one, but for rounding."""
        return max(0.0, 1.0 - float(self.weights[head, token].sum()))


class Experts(NamedTuple):
    """Which experts serve which token.

    Attributes:
        kind: of the mixture.
        weights: [T, E] of each expert's output for each token; in a soft mixture, of its parameters.
        chosen: [T, E] whether the token goes to the expert.
        names: of the experts; null experts, which compute nothing, come last.
    """

    kind: Literal["sparse", "dense", "soft"]
    weights: Float[np.ndarray, "T E"]
    chosen: Bool[np.ndarray, "T E"]
    names: tuple[str, ...]

    def of(self, token: int) -> list[tuple[int, float]]:
        """The experts of a token with their weights, the heaviest first."""
        order = np.argsort(-self.weights[token], kind="stable")
        return [(int(e), float(self.weights[token, e])) for e in order if self.chosen[token, e]]


class Layer(NamedTuple):
    """One block's part of the pass; `experts` is None for a plain FFN."""

    block: BlockConfig
    steps: tuple[Step, ...]
    looks: Looks
    experts: Experts | None


class Guess(NamedTuple):
    """A token that may come next."""

    token: int
    piece: str
    probability: float


@dataclass(frozen=True)
class Trace:
    """Every step of one forward pass. `str()` of it is a text, `.html()` a page; a notebook shows the page.

    Attributes:
        config: of the model.
        tokens: [T] ids.
        pieces: the text of each token.
        first: the steps before the layers.
        layers: the blocks, in order.
        last: the steps after the layers.
        guesses: the likeliest next tokens, the likeliest first.
        note: what a reader should know of the model.
    """

    config: ModelConfig
    tokens: Int[np.ndarray, "T"]
    pieces: tuple[str, ...]
    first: tuple[Step, ...]
    layers: tuple[Layer, ...]
    last: tuple[Step, ...]
    guesses: tuple[Guess, ...]
    note: str = ""

    @property
    def logits(self) -> Float[np.ndarray, "T V"]:
        """What `model.apply` gives for the tokens."""
        return self.last[-2].value

    def text(self, layers: int | None = None) -> str:
        """The pass as a text of at most 100 columns, with the first `layers` layers, or all."""
        from zoo.trace.text import render

        return render(self, layers)

    def html(self, layers: int | None = None) -> str:
        """The pass as one page that needs nothing else, with the first `layers` layers, or all."""
        from zoo.trace.page import render

        return render(self, layers)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        # In a frame, the page's style stays its own.
        return f'<iframe srcdoc="{html.escape(self.html())}" title="trace" style="{_FRAME}"></iframe>'


_FRAME = "width:100%;height:52rem;border:1px solid #8884;border-radius:8px"


def letters(config: ModelConfig, n_tokens: int) -> dict[str, tuple[int, str]]:
    """Letter of a dimension -> its size and what it counts, for the dimensions that are the same in all layers."""
    block = config.expand()[0].blocks[0]
    sizes: dict[str, tuple[int, str]] = {
        "T": (n_tokens, "tokens"),
        "V": (config.vocab_size, "tokens in the vocabulary"),
        "D": (config.d_model, "numbers per token in the residual stream"),
        "H": (block.n_heads, "query heads"),
        "K": (block.n_kv_heads, "key and value heads"),
        "h": (block.head_dim, "numbers per head"),
    }
    if config.moe is not None:
        sizes["E"] = (config.moe.n_experts + getattr(config.moe, "n_null_experts", 0), "experts")
        if config.moe.kind == "sparse":
            sizes["k"] = (config.moe.k, "experts per token")
    if _plain(config):
        sizes["F"] = (block.d_ff, "hidden units of the feed-forward network")
    return sizes


def _plain(config: ModelConfig) -> bool:
    return any(block.moe is None for stage in config.expand() for block in stage.blocks)
