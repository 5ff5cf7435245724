"""A forward pass, step by step."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zoo.config import ModelConfig
from zoo.data.tokenizer import Tokenizer
from zoo.models.decoder import Decoder
from zoo.trace.attending import looks_of
from zoo.trace.recorder import BlockRecord, Recorder
from zoo.trace.result import Guess, Layer, Trace
from zoo.trace.serving import experts_of
from zoo.trace.steps import first_steps, last_steps, layer_steps

# A page with more tokens has pictures that nobody can read.
MAX_TOKENS = 256
GUESSES = 10


class TraceError(ValueError):
    """A text that cannot be traced; the message says why and what to do."""


def trace(
    model: Decoder, params: Any, text: str | Sequence[int], tokenizer: Tokenizer | None = None, *, note: str = ""
) -> Trace:
    """Runs a text through a model, once and without a batch, and keeps every array with its meaning.

    Args:
        model: what `zoo.build` gives.
        params: its parameters.
        text: a text, or token ids.
        tokenizer: needed for a text; for ids, it names them.
        note: shown above the trace.

    Raises:
        TraceError: the text is empty or too long for the model or for a page, has tokens that the model lacks, or
            comes without a tokenizer.
    """
    tokens = _tokens(model.config, text, tokenizer)
    recorder = Recorder()
    logits = recorder.run(model, params, jnp.asarray(tokens)[None])
    last = last_steps(model.config, recorder, logits)
    return Trace(
        config=model.config,
        tokens=tokens,
        pieces=tuple(_piece(tokenizer, int(token)) for token in tokens),
        first=first_steps(model.config, tokens, recorder),
        layers=tuple(map(_layer, recorder.blocks)),
        last=last,
        guesses=_guesses(last[-1].value[-1], tokenizer),
        note=note,
    )


def _layer(record: BlockRecord) -> Layer:
    looks, experts = looks_of(record), experts_of(record)
    return Layer(record.block, layer_steps(record, looks, experts), looks, experts)


def _guesses(probabilities: np.ndarray, tokenizer: Tokenizer | None) -> tuple[Guess, ...]:
    best = np.argsort(-probabilities, kind="stable")[:GUESSES]
    return tuple(Guess(int(i), _piece(tokenizer, int(i)), float(probabilities[i])) for i in best)


def _tokens(config: ModelConfig, text: Any, tokenizer: Tokenizer | None) -> np.ndarray:
    if isinstance(text, str):
        if tokenizer is None:
            raise TraceError("trace: a text needs a tokenizer; give tokenizer=..., or token ids instead of the text")
        text = tokenizer.encode(text)
    tokens = _row(text)
    if tokens.size == 0:
        raise TraceError("trace: the text is empty; give at least one token")
    limit = min(config.context_length, MAX_TOKENS)
    if tokens.size > limit:
        why = f"model.context_length={limit}" if limit == config.context_length else f"the {limit} that a page can show"
        raise TraceError(f"trace: the text is {tokens.size} tokens long, more than {why}; shorten it")
    if unknown := [int(token) for token in tokens if not 0 <= token < config.vocab_size]:
        raise TraceError(
            f"trace: token {unknown[0]} is outside of model.vocab_size={config.vocab_size}; use the model's tokenizer"
        )
    return tokens.astype(np.int32)


def _row(ids: Any) -> np.ndarray:
    """Token ids as whole numbers in a row."""
    try:
        row = np.asarray(ids)
    except ValueError:  # rows of different lengths
        row = np.empty((0, 0))
    if row.ndim != 1:
        raise TraceError("trace: the tokens are not one row; give the ids of one text, a list of whole numbers")
    if row.size and row.dtype.kind not in "iu":
        raise TraceError(f"trace: token {row[0]} is of type {row.dtype}; ids are whole numbers")
    return row


def _piece(tokenizer: Tokenizer | None, token: int) -> str:
    """The text of a token; for a special, its name, and without a tokenizer, its number."""
    if tokenizer is None:
        return str(token)
    specials = {tokenizer.eos_id: "<eos>", tokenizer.bos_id: "<bos>", tokenizer.pad_id: "<pad>"}
    data = tokenizer.token_bytes(token)
    try:
        return data.decode() if data else specials.get(token, "")
    except UnicodeDecodeError:  # a part of a character
        return "".join(f"<0x{byte:02X}>" for byte in data)
