"""Text from a trained model: batches of prompts, a cache, one token at a time."""

import functools
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.infer.sampler import row_keys, sample
from zoo.infer.stream import TextStream
from zoo.layers.embedding import logits

# Lengths are rounded up to multiples of these, so that few programs serve all prompts.
PROMPT_MULTIPLE = 32
CACHE_MULTIPLE = 64
# New tokens where nobody says how many.
MAX_TOKENS = 200


# Beyond it nothing changes: every token is as likely as the next, to float32.
MAX_TEMPERATURE = 1e30


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
    max_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: SupportsIndex | Sequence[SupportsIndex] = 0,
    stop: str | Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
) -> list[str]:
    """How a model goes on from each prompt, without the prompt itself.

    A row ends at the EOS token, before the first stop string, or after `max_tokens` tokens. It begins with the BOS
    token where the documents of its training did (`run.config.data.add_bos`). Its text depends on
    its prompt, its seed and these settings, and not on the other rows. (Matrix products of another size may
    round differently, so logits that are equal to the last bits may be told apart otherwise in another batch.)

    Args:
        run: what `zoo.load` gives, or anything with its model, params, tokenizer and config.
        prompts: one text or several, of any lengths; "" begins a document, which takes a BOS token.
        max_tokens: the most new tokens per row; None for as many as the context leaves the row, at most 200.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from this many likeliest tokens; None from all.
        top_p: then from the smallest set of them that carries this mass; None from all.
        seed: of the first row, the next row has the next (0 after 2^32 - 1); or one seed per row.
        stop: one string or several that end a row.
        on_text: called with the row and each further piece of its text; a row's pieces add up to its text.

    Raises:
        PromptError: a setting is out of range or of another type, or a prompt leaves no room for `max_tokens` in
            the context or is empty where there is no BOS token.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    stop = [stop] if isinstance(stop, str) else list(stop)
    _check_settings(max_tokens, temperature, top_k, top_p, stop)
    seeds = _seeds(seed, len(prompts))
    encoded = [_encode(run, prompt, i) for i, prompt in enumerate(prompts)]
    limits = [_limit(len(ids), max_tokens, run.model.config.context_length, i) for i, ids in enumerate(encoded)]
    if not prompts:
        return []
    sampling = _sampling(run, temperature, top_k, top_p)
    streams = [TextStream(run.tokenizer, tokens, stop) for tokens in encoded]
    _write(_tokens(run, encoded, seeds, max(limits), sampling), streams, limits, run.tokenizer.eos_id, on_text)
    return [stream.text for stream in streams]


def room(run: Any, prompt: str) -> int:
    """How many tokens the context leaves after a prompt; asks for no parameters.

    Raises:
        PromptError: none, or the prompt is empty where there is no BOS token.
    """
    context_length, tokens = run.model.config.context_length, _encode(run, prompt, 0)
    _limit(len(tokens), None, context_length, 0)
    return context_length - len(tokens)


def _write(
    tokens: Any,
    streams: list[TextStream],
    limits: list[int],
    eos_id: int,
    on_text: Callable[[int, str], None] | None,
) -> None:
    """Feeds each row's tokens, as many as its limit, to its stream until every row has ended."""
    show = on_text or (lambda row, piece: None)
    open_rows = set(range(len(streams)))
    for n, step in enumerate(tokens, 1):
        for row in sorted(open_rows):
            stream, token = streams[row], int(step[row])
            ends = token == eos_id or n == limits[row]
            piece = "" if token == eos_id else stream.push(token)
            piece += stream.finish() if ends else ""
            if piece:
                show(row, piece)
            if ends or stream.stopped:
                open_rows.remove(row)
        if not open_rows:
            return


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
    scores = logits(row, model.head_weights(params), model.config)
    return _draw(scores, row_keys(keys, 0), sampling), hidden.cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _next(
    model: Any, params: Any, token: Int[Array, "B"], cache: Any, keys: Key[Array, "B"], n: Any, sampling: Sampling
) -> tuple[Int[Array, "B"], Any]:
    """The token after `token`, which is the n-th new one of every row, and the cache with `token` in it."""
    # A row that has ended where the context ends goes on in its last place, where it disturbs nothing.
    cache = cache._replace(length=jnp.minimum(cache.length, model.config.context_length - 1))
    out = model.apply({"params": params}, token[:, None], cache=cache)
    return _draw(out.logits[:, 0], row_keys(keys, n), sampling), out.cache


def _draw(scores: Float[Array, "B V"], keys: Key[Array, "B"], sampling: Sampling) -> Int[Array, "B"]:
    scores = jnp.where(sampling.allowed, scores, -jnp.inf)
    return sample(scores, keys, sampling.temperature, sampling.top_k, sampling.top_p)


def _allowed(tokenizer: Any, vocab_size: int) -> Bool[np.ndarray, "V"]:
    """What may be drawn: not padding, not BOS, nothing that the tokenizer does not know."""
    allowed = np.arange(vocab_size) < tokenizer.vocab_size
    unwanted = {tokenizer.pad_id, tokenizer.bos_id} - {tokenizer.eos_id, -1}
    allowed[list(unwanted)] = False
    return allowed


def _sampling(run: Any, temperature: float, top_k: int | None, top_p: float | None) -> Sampling:
    vocab_size = run.model.config.vocab_size
    return Sampling(
        float(temperature),
        None if top_k is None else min(int(top_k), vocab_size),
        None if top_p is None else float(top_p),
        _allowed(run.tokenizer, vocab_size),
    )


def _encode(run: Any, prompt: Any, index: int) -> list[int]:
    if not isinstance(prompt, str):
        raise PromptError(f"prompt {index} is of type {type(prompt).__name__}; give a text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"prompt {index} holds no valid character at {error.start}; write it in UTF-8") from None
    data = run.config.data
    tokens = ([run.tokenizer.bos_id] if data.add_bos else []) + run.tokenizer.encode(prompt)
    if not tokens:
        raise PromptError(
            f"prompt {index} is empty, and the model was trained without a BOS token to begin with "
            f"({data.named('add_bos')}); give some text"
        )
    return tokens


def _right_padded(rows: list[list[int]], length: int) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
    tokens = np.zeros((len(rows), length), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    real = np.arange(length) < np.array([[len(ids)] for ids in rows])
    return tokens, real.astype(np.int32)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _seeds(seed: Any, n_rows: int) -> list[int]:
    try:
        first = operator.index(seed)
        return [(_in_range(first) + row) % 2**32 for row in range(n_rows)]
    except TypeError:
        pass
    try:
        seeds = [_in_range(operator.index(s)) for s in seed]
    except TypeError:
        raise PromptError(f"seed={seed!r} must be a whole number, or one per prompt") from None
    if len(seeds) != n_rows:
        raise PromptError(f"seed holds {len(seeds)} numbers for {n_rows} prompts; give one number, or one per prompt")
    return seeds


def _in_range(seed: int) -> int:
    if not 0 <= seed < 2**32:
        raise PromptError(f"seed={seed} must be at least 0 and less than 2^32")
    return seed


def _check_settings(max_tokens: Any, temperature: Any, top_k: Any, top_p: Any, stop: list[Any]) -> None:
    if not (max_tokens is None or _is_positive(max_tokens)):
        raise PromptError(
            f"max_tokens={max_tokens!r} must be a whole number of at least 1, or None for what the context leaves"
        )
    if not (_is_number(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
        raise PromptError(f"temperature={temperature!r} must lie between 0, which is greedy, and {MAX_TEMPERATURE:.0e}")
    if not (top_k is None or _is_positive(top_k)):
        raise PromptError(f"top_k={top_k!r} must be a whole number of at least 1, or None for all tokens")
    if not (top_p is None or (_is_number(top_p) and 0 < top_p <= 1)):
        raise PromptError(f"top_p={top_p!r} must lie in (0, 1], or be None for all tokens")
    if not all(isinstance(text, str) and text for text in stop):
        raise PromptError(f"stop={stop!r} must be texts; an empty one would end every row before it begins")


def _is_positive(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _limit(length: int, max_tokens: int | None, context_length: int, index: int) -> int:
    """How many new tokens a row of `length` tokens may get."""
    context = f"model.context_length={context_length}"
    if length >= context_length:
        raise PromptError(f"prompt {index} is {length} tokens long, which leaves no room in {context}; shorten it")
    if max_tokens is None:
        return min(MAX_TOKENS, context_length - length)
    if (excess := length + max_tokens - context_length) > 0:
        raise PromptError(
            f"prompt {index} of {length} tokens and max_tokens={max_tokens} pass {context} by {excess}; "
            f"set max_tokens to at most {context_length - length}, or shorten the prompt"
        )
    return max_tokens
