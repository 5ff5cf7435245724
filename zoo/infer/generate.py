"""Text from a trained model: batches of prompts, a cache, one token at a time."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.infer.sampler import row_keys, sample
from zoo.infer.stream import TextStream

# Lengths are rounded up to multiples of these, so that few programs serve all prompts.
PROMPT_MULTIPLE = 32
CACHE_MULTIPLE = 64


class PromptError(ValueError):
    """A prompt or a setting that no text can be generated from; the message names it and its value."""


class Sampling(NamedTuple):
    """How the next token is drawn.

    Attributes:
        temperature, top_k, top_p: as in `sampler.sample`.
        allowed: [V] the tokens that may be drawn.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    allowed: Any


def generate(
    run: Any,
    prompts: str | Sequence[str],
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
) -> list[str]:
    """How a model goes on from each prompt, without the prompt itself.

    A row ends at the EOS token, before the first stop string, or after `max_tokens` tokens. Its text depends on
    its prompt, its seed and these settings, and not on the other rows. (Matrix products of another size may
    round differently, so logits that are equal to the last bits may be told apart otherwise in another batch.)

    Args:
        run: what `zoo.load` gives, or anything with its model, params and tokenizer.
        prompts: one text or several, of any lengths; "" begins a document.
        max_tokens: the most new tokens per row.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from this many likeliest tokens; None from all.
        top_p: then from the smallest set of them that carries this mass; None from all.
        seed: of the first row, the next row has the next; or one seed per row. Taken modulo 2^32.
        stop: one string or several that end a row.
        on_text: called with the row and each further piece of its text; a row's pieces add up to its text.

    Raises:
        PromptError: a setting is out of range, or a prompt leaves no room for `max_tokens` in the context.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    stop = [stop] if isinstance(stop, str) else list(stop)
    _check_settings(max_tokens, temperature, top_k, top_p, stop)
    seeds = _seeds(seed, len(prompts))
    encoded = [_encode(run.tokenizer, prompt, i) for i, prompt in enumerate(prompts)]
    for i, tokens in enumerate(encoded):
        _check_length(len(tokens), max_tokens, run.model.config.context_length, i)
    if not prompts:
        return []
    allowed = _allowed(run.tokenizer, run.model.config.vocab_size)
    sampling = Sampling(float(temperature), top_k, None if top_p is None else float(top_p), allowed)
    streams = [TextStream(run.tokenizer, tokens, stop) for tokens in encoded]
    _write(_tokens(run, encoded, seeds, max_tokens, sampling), streams, run.tokenizer.eos_id, on_text)
    return [stream.text for stream in streams]


def _write(tokens: Any, streams: list[TextStream], eos_id: int, on_text: Callable[[int, str], None] | None) -> None:
    """Feeds each row's tokens to its stream until every row has ended."""
    show = on_text or (lambda row, piece: None)
    open_rows = set(range(len(streams)))
    for step in tokens:
        for row in sorted(open_rows):
            piece = streams[row].finish() if step[row] == eos_id else streams[row].push(int(step[row]))
            if piece:
                show(row, piece)
            if step[row] == eos_id or streams[row].stopped:
                open_rows.remove(row)
        if not open_rows:
            return
    for row in sorted(open_rows):
        if piece := streams[row].finish():
            show(row, piece)


def _tokens(run: Any, encoded: list[list[int]], seeds: list[int], max_tokens: int, sampling: Sampling) -> Any:
    """Yields the next token of every row, [B], `max_tokens` times. Rows that have ended go on; nobody reads them."""
    context = run.model.config.context_length
    longest = max(map(len, encoded))
    tokens, segment_ids = _right_padded(encoded, min(_round_up(longest, PROMPT_MULTIPLE), context))
    length = min(_round_up(longest + max_tokens, CACHE_MULTIPLE), context)
    keys = jax.vmap(jax.random.key)(np.array(seeds, np.uint32))
    token, cache = _first(run.model, length, run.params, tokens, segment_ids, keys, sampling)
    for n in range(1, max_tokens):
        # The device is given its next step before the host reads the last one.
        following, cache = _next(run.model, run.params, token, cache, keys, n, sampling)
        yield np.asarray(token)
        token = following
    yield np.asarray(token)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _first(
    model: Any,
    length: int,
    params: Any,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    keys: Key[Array, "B"],
    sampling: Sampling,
) -> tuple[Int[Array, "B"], Any]:
    """The first new token of every row, and the cache of its prompt with room for `length` tokens."""
    cache = model.init_cache(tokens.shape[0], length)
    hidden = model.apply({"params": params}, tokens, segment_ids=segment_ids, cache=cache, method="hidden")
    last = jnp.sum(segment_ids, axis=1)[:, None, None] - 1
    # Only the last token's logits are wanted: those of a whole prompt would fill the memory.
    row = jnp.take_along_axis(hidden.hidden, last, axis=1)[:, 0]
    weights = model.head_weights(params).astype(row.dtype)
    logits = jnp.einsum("BD,DV->BV", row, weights, preferred_element_type=jnp.float32)
    return _draw(logits, row_keys(keys, 0), sampling), hidden.cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _next(
    model: Any, params: Any, token: Int[Array, "B"], cache: Any, keys: Key[Array, "B"], n: Any, sampling: Sampling
) -> tuple[Int[Array, "B"], Any]:
    """The token after `token`, which is the n-th new one of every row, and the cache with `token` in it."""
    out = model.apply({"params": params}, token[:, None], cache=cache)
    return _draw(out.logits[:, 0], row_keys(keys, n), sampling), out.cache


def _draw(logits: Float[Array, "B V"], keys: Key[Array, "B"], sampling: Sampling) -> Int[Array, "B"]:
    logits = jnp.where(sampling.allowed, logits, -jnp.inf)
    return sample(logits, keys, sampling.temperature, sampling.top_k, sampling.top_p)


def _allowed(tokenizer: Any, vocab_size: int) -> Bool[np.ndarray, "V"]:
    """What may be drawn: not padding, not BOS, nothing that the tokenizer does not know."""
    allowed = np.arange(vocab_size) < tokenizer.vocab_size
    unwanted = {tokenizer.pad_id, tokenizer.bos_id} - {tokenizer.eos_id, -1}
    allowed[list(unwanted)] = False
    return allowed


def _encode(tokenizer: Any, prompt: str, index: int) -> list[int]:
    tokens = ([tokenizer.bos_id] if tokenizer.bos_id >= 0 else []) + tokenizer.encode(prompt)
    if not tokens:
        raise PromptError(f"prompt {index} is empty, and the tokenizer has no BOS token to begin with; give some text")
    return tokens


def _right_padded(rows: list[list[int]], length: int) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
    tokens = np.zeros((len(rows), length), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    real = np.arange(length) < np.array([[len(ids)] for ids in rows])
    return tokens, real.astype(np.int32)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _seeds(seed: int | Sequence[int], n_rows: int) -> list[int]:
    seeds = [seed + row for row in range(n_rows)] if isinstance(seed, int) else list(seed)
    if len(seeds) != n_rows:
        raise PromptError(f"seed holds {len(seeds)} numbers for {n_rows} prompts; give one number, or one per prompt")
    return [s % 2**32 for s in seeds]


def _check_settings(max_tokens: int, temperature: float, top_k: int | None, top_p: float | None, stop: list) -> None:
    if max_tokens < 1:
        raise PromptError(f"max_tokens={max_tokens} must be at least 1")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise PromptError(f"temperature={temperature} must be a finite number of at least 0; 0 is greedy")
    if top_k is not None and top_k < 1:
        raise PromptError(f"top_k={top_k} must be at least 1, or None for all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise PromptError(f"top_p={top_p} must lie in (0, 1], or be None for all tokens")
    if "" in stop:
        raise PromptError("stop='' would end every text before it begins; leave it out")


def _check_length(length: int, max_tokens: int, context_length: int, index: int) -> None:
    context = f"model.context_length={context_length}"
    if length >= context_length:
        raise PromptError(f"prompt {index} is {length} tokens long, which leaves no room in {context}; shorten it")
    if (excess := length + max_tokens - context_length) > 0:
        raise PromptError(
            f"prompt {index} of {length} tokens and max_tokens={max_tokens} pass {context} by {excess}; "
            f"set max_tokens to at most {context_length - length}, or shorten the prompt"
        )
