"""A trace as plain text."""

import textwrap
from collections.abc import Iterable, Iterator

import numpy as np

from zoo.trace.result import Experts, Layer, Looks, Step, Trace, letters
from zoo.trace.words import layer_formula

WIDTH = 100
# As many of the last tokens as a picture shows in one line.
SHOWN = 64


def render(trace: Trace, layers: int | None = None) -> str:
    """The whole pass; a step is explained in the first layer that has it."""
    lines, explained = [*_heading(trace), *_table(trace.first)], set()
    for i, layer in enumerate(trace.layers[:layers]):
        new = [step for step in layer.steps if step.words not in explained]
        explained |= {step.words for step in new}
        lines += ["", *_rule(f"layer {i} of {len(trace.layers)}"), *_layer(trace, layer, new)]
    if (left_out := len(trace.layers) - len(trace.layers[:layers])) > 0:
        lines += ["", f"({left_out} more layers are not shown.)"]
    return "\n".join([*lines, "", *_rule("the next token"), *_table(trace.last), "", *_guesses(trace)]) + "\n"


def _rule(title: str) -> Iterator[str]:
    yield f"--- {title} ".ljust(WIDTH, "-")


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def _heading(trace: Trace) -> Iterator[str]:
    yield from _wrapped(trace.note) if trace.note else ()
    yield ""
    pieces = " ".join(repr(piece).replace(" ", "\0") for piece in trace.pieces)  # lines break between pieces only
    yield from (line.replace("\0", " ") for line in _wrapped(f"{len(trace.tokens)} tokens: {pieces}"))
    yield ""
    for letter, (size, what) in letters(trace.config, len(trace.tokens)).items():
        yield f"  {letter} = {size:<6} {what}"
    yield ""


def _table(steps: Iterable[Step]) -> Iterator[str]:
    """Name, shape and size of each array over its formula and meaning."""
    for step in steps:
        shape = f"[{' '.join(step.axes)}] = {' x '.join(map(str, step.value.shape))}"
        yield f"{step.name:<40}{shape:<26}{_size(step.value)}".rstrip()
        yield from _wrapped(step.formula, "    ")
        yield from _wrapped(step.meaning, "    ")


def _size(value: np.ndarray) -> str:
    """The root mean square, for arrays of which that says something."""
    if np.issubdtype(value.dtype, np.integer) or value.dtype == bool:
        return ""
    return f"root mean square {np.sqrt(np.mean(np.square(value, dtype=np.float64))):.3g}"


def _layer(trace: Trace, layer: Layer, new: list[Step]) -> Iterator[str]:
    """The steps that are new in this layer, and what happens in it."""
    yield layer_formula(layer.block)
    yield "" if len(new) == len(layer.steps) else "Steps as before." if not new else "Steps as before, but for:"
    yield from _table(new)
    if any(step.name == "mask" for step in new):
        yield ""
        yield from _mask(trace.pieces, layer.looks)
    yield ""
    yield from _looks(trace.pieces, layer.looks)
    if layer.experts is not None:
        yield ""
        yield from _experts(trace.pieces, layer.experts)


def _labels(pieces: tuple[str, ...]) -> list[str]:
    """`3 'the'` for every token, all of one width."""
    labels = [f"{i:>3} {piece!r}" for i, piece in enumerate(pieces)]
    width = min(20, max(map(len, labels)))
    return [label[:width].ljust(width) for label in labels]


def _mask(pieces: tuple[str, ...], looks: Looks) -> Iterator[str]:
    left_out = max(0, len(pieces) - SHOWN)
    yield "The mask: the token of a row may look at those marked #" + (
        f" (the last {SHOWN} tokens)." if left_out else "."
    )
    for label, row in list(zip(_labels(pieces), looks.visible, strict=True))[left_out:]:
        yield f"  {label} " + "".join("#" if seen else "." for seen in row[left_out:])


def _looks(pieces: tuple[str, ...], looks: Looks) -> Iterator[str]:
    last = len(pieces) - 1
    yield f"Where the last token, {last} {pieces[last]!r}, looks:"
    for head in range(looks.weights.shape[0]):
        seen = [f"{weight:4.0%} {i} {pieces[i]!r}" for i, weight in looks.strongest(head, last)]
        sink = looks.sink(head, last)
        seen += [f"{sink:4.0%} sink"] if sink > 0.005 else []
        yield f"  head {head:<3} " + "   ".join(f"{part:<18}" for part in seen).rstrip()


def _experts(pieces: tuple[str, ...], experts: Experts) -> Iterator[str]:
    left_out = max(0, len(pieces) - SHOWN)
    kinds = {"sparse": "go to", "dense": "are shared among", "soft": "share a mean of"}
    yield f"The experts that tokens {kinds[experts.kind]}, with their weights" + (
        f" (the last {SHOWN} tokens):" if left_out else ":"
    )
    for token, label in list(enumerate(_labels(pieces)))[left_out:]:
        served = [f"{weight:4.0%} {experts.names[e]}" for e, weight in experts.of(token)[:5]]
        yield f"  {label} " + "  ".join(f"{part:<15}" for part in served).rstrip()


def _guesses(trace: Trace) -> Iterator[str]:
    yield f"The {len(trace.guesses)} likeliest tokens after {trace.pieces[-1]!r}:"
    largest = trace.guesses[0].probability
    for guess in trace.guesses:
        bar = "#" * round(40 * guess.probability / largest)
        yield f"  {guess.probability:6.2%} {guess.piece!r:<16} {bar}"
