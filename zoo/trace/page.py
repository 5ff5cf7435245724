"""A trace as one HTML page that needs nothing else: no network, no library, and no script to be read."""

import re
from collections.abc import Iterable, Iterator
from html import escape

import numpy as np

from zoo.trace.pictures import shares, signed
from zoo.trace.result import Experts, Layer, Looks, Step, Trace, letters
from zoo.trace.style import SCRIPT, STYLE
from zoo.trace.words import layer_formula


def render(trace: Trace, layers: int | None = None) -> str:
    """The page. A script lets the reader choose a token; without it, all is shown for the last one."""
    shown = trace.layers[:layers]
    body = [*_heading(trace), *_navigation(trace, len(shown)), *_beginning(trace)]
    explained: set[tuple[str, ...]] = set()
    for i, layer in enumerate(shown):
        words = {step.words for step in layer.steps}
        body += _layer(trace, i, layer, is_new=not words <= explained)
        explained |= words
    if len(shown) < len(trace.layers):
        body.append(f'<p class="lead">{len(trace.layers) - len(shown)} more layers are not shown.</p>')
    body += _ending(trace)
    return _PAGE.format(
        n=len(trace.tokens), last=len(trace.tokens) - 1, style=STYLE, script=SCRIPT, body="\n".join(body)
    )


_PAGE = """<!doctype html>
<html lang="en" style="--n:{n};--at:{last}">
<head>
<meta charset="utf-8">
<meta name="generator" content="zoo trace">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>One sentence through a language model</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""


def visible(piece: str) -> str:
    """A piece with signs for white space, as HTML."""
    for character, sign in ((" ", "␣"), ("\n", "⏎"), ("\t", "⇥")):
        piece = piece.replace(character, sign)
    return escape(piece) or "∅"


def formula(text: str) -> str:
    """x_t and W^T with real indices, as HTML."""
    text = re.sub(r"_(\w+'?)", r"<sub>\1</sub>", escape(text, quote=False))
    return re.sub(r"\^(\w+)", r"<sup>\1</sup>", text)


# -------------------------------------------------------------------------------------------- around the layers


def _heading(trace: Trace) -> Iterator[str]:
    yield '<header><p class="kicker">zoo trace</p><h1>One sentence through a language model</h1>'
    yield '<p class="lead">A language model reads tokens and says which one comes next. This page shows all that it '
    yield f"computes on the way. {escape(trace.note)}</p>"
    yield '<dl class="letters">'
    for letter, (size, what) in letters(trace.config, len(trace.tokens)).items():
        yield f"<div><dt>{letter} = {size:,}</dt><dd>{what}</dd></div>"
    yield "</dl></header>"


def _navigation(trace: Trace, n_layers: int) -> Iterator[str]:
    """The tokens, one of which can be chosen, and the way to each part of the page."""
    yield '<nav aria-label="tokens and layers"><div class="chips" role="group" aria-label="choose a token">'
    for i, (piece, token) in enumerate(zip(trace.pieces, trace.tokens, strict=True)):
        pressed = "true" if i == len(trace.tokens) - 1 else "false"
        title = f"token {i}, number {token}"
        yield f'<button class="chip" aria-pressed="{pressed}" title="{title}">{visible(piece)}</button>'
    yield '</div><div class="jump"><a href="#first">embedding</a>'
    yield from (f'<a href="#layer-{i}">layer {i}</a>' for i in range(n_layers))
    yield '<a href="#next">next token</a></div></nav>'


def _beginning(trace: Trace) -> Iterator[str]:
    yield '<section id="first"><h2>Text becomes tokens, tokens become vectors</h2>'
    yield '<p class="hint">The tables show every array that the model computes, in order. In the pictures a row is a '
    yield "token; blue numbers lie above 0, orange ones below, and strong colours are far from it.</p>"
    yield from _table(trace.first)
    yield "</section>"


def _ending(trace: Trace) -> Iterator[str]:
    last = visible(trace.pieces[-1])
    yield '<section id="next"><h2>The next token</h2>'
    yield from _table(trace.last)
    yield f'<h3>The {len(trace.guesses)} likeliest tokens after <q>{last}</q></h3><table class="guesses">'
    yield "<tr><th scope=col>token</th><th scope=col>number</th><th scope=col>probability</th></tr>"
    largest = trace.guesses[0].probability
    for guess in trace.guesses:
        bar = f'<span class="bar" style="width:{100 * guess.probability / largest:.1f}%"></span>'
        yield f"<tr><th scope=row>{visible(guess.piece)}</th><td>{guess.token}</td>"
        yield f"<td>{bar}<span>{guess.probability:.2%}</span></td></tr>"
    yield "</table></section>"


# ---------------------------------------------------------------------------------------------------- one layer


def _layer(trace: Trace, number: int, layer: Layer, is_new: bool) -> Iterator[str]:
    """A layer; of steps that have been explained, the table is closed."""
    yield f'<section id="layer-{number}"><h2>Layer {number} <small>of {len(trace.layers)}</small></h2>'
    yield f'<p class="formula">{formula(layer_formula(layer.block))}</p>'
    yield f"<details{' open' if is_new else ''}><summary>Every array of this layer</summary>"
    yield from _table(layer.steps)
    yield "</details>"
    yield "<h3>Where tokens look</h3>"
    yield _LOOKS if is_new else ""
    yield from _looks(trace, layer)
    if layer.experts is not None:
        yield "<h3>Which experts serve which token</h3>"
        yield f'<p class="hint">{_EXPERTS[layer.experts.kind]}</p>' if is_new else ""
        yield from _experts(trace, layer.experts)
    yield "</section>"


_LOOKS = """<p class="hint">A row is a token, and its strong cells are the tokens that it looks at. Below each head, the
text as the chosen token sees it (the last one, until you choose another above).</p>"""
_EXPERTS = {
    "sparse": "A column is a token; its coloured cells are the experts that it goes to, with their weights in percent.",
    "dense": "A column is a token; every expert serves it, with these weights in percent.",
    "soft": "A column is a token; its expert is a mean of all, with these weights in percent.",
}


def _table(steps: Iterable[Step]) -> Iterator[str]:
    yield '<div class="scroll"><table class="steps"><tr><th scope=col>array</th><th scope=col>how it comes about</th>'
    yield "<th scope=col>what it is</th><th scope=col>a look at it</th></tr>"
    for step in steps:
        sizes = " × ".join(f"{n:,}" for n in step.value.shape)
        shape = f'<span class="shape">{" ".join(step.axes)} <small>{sizes}</small></span>'
        yield f'<tr{_kind(step)}><th scope=row>{step.name}{shape}</th><td class="formula">{formula(step.formula)}</td>'
        yield f"<td>{formula(step.meaning)}</td><td>{_thumbnail(step)}</td></tr>"
    yield "</table></div>"


def _kind(step: Step) -> str:
    return ' class="stream"' if step.name.startswith("stream") or step.name == "embedding" else ""


def _thumbnail(step: Step) -> str:
    """A picture with a row per token; of the weights of attention, the heads side by side."""
    value = step.value
    if value.ndim == 1 or np.issubdtype(value.dtype, np.integer):
        numbers = " ".join(map(str, value.reshape(-1)[:12].tolist()))
        return f'<span class="numbers">{numbers}{" …" if value.size > 12 else ""}</span>'
    if step.axes[0] == "H":
        value = np.moveaxis(value, 0, 1)
    flat = value.reshape(len(value), -1).astype(np.float32)
    source = signed(flat) if np.any(flat < 0) else shares(flat / (flat.max() or 1))
    size = "" if np.all(flat >= 0) else f"root mean square {np.sqrt(np.mean(flat**2)):.2g}"
    return f'<img class="thumb" src="{source}" alt="{step.name}: a row per token"><small>{size}</small>'


def _looks(trace: Trace, layer: Layer) -> Iterator[str]:
    looks, last = layer.looks, len(trace.tokens) - 1
    yield '<div class="heads">'
    yield _figure("mask", shares(looks.visible.astype(np.float32)), "who may look at whom", "")
    for head, weights in enumerate(looks.weights):
        seen = list(zip(map(visible, trace.pieces), weights[last].tolist(), strict=True))
        seen += [(" (sink)", looks.sink(head, last))] if layer.block.attention_sinks else []
        line = "".join(_shaded(*pair) for pair in seen)
        yield _figure(f"head {head}", shares(weights), _in_words(trace, looks, head), line)
    yield "</div>"


def _shaded(piece: str, weight: float) -> str:
    return f'<span style="--w:{np.sqrt(weight):.2f}" title="{weight:.0%}">{piece}</span>'


def _figure(title: str, source: str, words: str, line: str) -> str:
    text = f'<p class="line">{line}</p>' if line else ""
    picture = f'<div class="grid"><img src="{source}" alt="{escape(words)}"><i></i></div>'
    return f"<figure><figcaption>{title}</figcaption>{picture}{text}</figure>"


def _in_words(trace: Trace, looks: Looks, head: int) -> str:
    last = len(trace.tokens) - 1
    seen = (f"{trace.pieces[i]!r} at {i} ({weight:.0%})" for i, weight in looks.strongest(head, last))
    return f"head {head}: the last token looks at {', '.join(seen)}"


def _experts(trace: Trace, experts: Experts) -> Iterator[str]:
    """A row per expert and a column per token."""
    yield '<div class="scroll"><table class="experts"><tr><td></td>'
    for i, piece in enumerate(trace.pieces):
        current = "true" if i == len(trace.tokens) - 1 else "false"
        yield f'<th scope=col data-at="{i}" aria-current="{current}">{visible(piece)}</th>'
    yield "</tr>"
    for e, name in enumerate(experts.names):
        hue = round(137.5 * e) % 360  # the golden angle keeps neighbours apart
        yield f'<tr style="--hue:{hue}"><th scope=row>{name}</th>'
        yield from (_cell(experts, token, e) for token in range(len(trace.tokens)))
        yield "</tr>"
    yield "</table></div>"


def _cell(experts: Experts, token: int, e: int) -> str:
    if not experts.chosen[token, e]:
        return "<td></td>"
    weight = experts.weights[token, e]
    return f'<td class="on" style="--w:{np.sqrt(min(weight, 1)):.2f}" title="{weight:.1%}">{100 * weight:.0f}</td>'
