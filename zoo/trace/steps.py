"""The arrays of a forward pass, in order, with a formula and a sentence for each."""

from collections.abc import Iterator

import jax
import numpy as np
from jax.typing import ArrayLike

from zoo.config import BlockConfig, ModelConfig
from zoo.trace.attending import attention_steps
from zoo.trace.recorder import BlockRecord, Recorder
from zoo.trace.result import Experts, Looks, Step
from zoo.trace.serving import ffn_steps, mixture_steps
from zoo.trace.words import array, norm_formula, read_by


def first_steps(config: ModelConfig, tokens: np.ndarray, recorder: Recorder) -> tuple[Step, ...]:
    """Tokens and embedding."""
    stream = array(recorder.blocks[0].calls["block"].x)
    return (
        Step(
            "tokens",
            ("T",),
            "tokenizer(text)",
            "The text, cut into pieces, as the numbers that these have in the vocabulary. Causal: no number below "
            "depends on a later token.",
            tokens,
        ),
        Step(
            "embedding",
            ("T", "D"),
            _embedding_formula(config),
            "Each token's number picks a row of a learned table. These rows begin the residual stream x: every layer "
            "reads it and adds to it, and the next token is read off its end.",
            stream,
        ),
    )


def _embedding_formula(config: ModelConfig) -> str:
    formula = "table[token_t]" + (" · √D" if config.embedding_scale else "")
    if config.position == "learned":
        formula += " + positions[t]"
    if config.position == "sinusoidal":
        formula += " + sin and cos of t"
    return f"x_t = norm({formula})" if config.embedding_norm else f"x_t = {formula}"


def last_steps(config: ModelConfig, recorder: Recorder, logits: ArrayLike) -> tuple[Step, ...]:
    """From the last block's stream to the next token; logits and probabilities are the last two."""
    steps = []
    block = recorder.blocks[-1].block
    if "final_norm" in recorder.outside:
        steps.append(
            Step(
                "final norm",
                ("T", "D"),
                f"n = {norm_formula(block)}",
                "The finished stream, brought to a common size.",
                array(recorder.outside["final_norm"].result),
            )
        )
    logits = array(logits)
    probabilities = np.asarray(jax.nn.softmax(logits, axis=-1))
    steps += [
        Step(
            "logits",
            ("T", "V"),
            _logits_formula(config, "n" if steps else "x"),
            "A score for every token of the vocabulary, at every place: how well it would go on from there"
            + (" (the head is the embedding table, read the other way)." if config.tie_embeddings else "."),
            logits,
        ),
        Step(
            "probabilities",
            ("T", "V"),
            "p_v = exp(z_v) / Σ_u exp(z_u)",
            "The scores as shares of 1. Row t is the guess for token t + 1; the last row is the guess for what is not "
            "written yet. Training raises the probability of what did come.",
            probabilities,
        ),
    ]
    return tuple(steps)


def _logits_formula(config: ModelConfig, stream: str) -> str:
    head = f"{stream} table^T" if config.tie_embeddings else f"{stream} W_head"
    head += " + b" if config.head_bias else ""
    cap = config.logit_softcap
    return f"z = {head}" if cap is None else f"z = {cap:g} tanh(({head}) / {cap:g})"


# ------------------------------------------------------------------------------------------------ of one layer


def layer_steps(record: BlockRecord, looks: Looks, experts: Experts | None) -> tuple[Step, ...]:
    """All arrays of a block, in the order of the computation."""
    steps = [*_reading(record, "attention_norm", "attention"), *attention_steps(record, looks)]
    steps += _writing(record, "attention", "attention_norm", "attention_post_norm")
    steps += _reading(record, "ffn_norm", "ffn")
    steps += ffn_steps(record) if experts is None else mixture_steps(record, experts)
    return (*steps, *_writing(record, "ffn", "ffn_norm", "ffn_post_norm"))


def _reading(record: BlockRecord, norm: str, part: str) -> Iterator[Step]:
    """What a part reads of the stream, where that is not the stream itself."""
    if read_by(record.block) == "x" or norm not in record.calls:
        return
    whom = "both parts" if record.block.parallel == "one_norm" else _PARTS[part]
    meaning = f"The stream, brought to a common size: what {whom} read{'' if whom == 'both parts' else 's'}."
    yield Step(
        f"input of {whom}",
        ("T", "D"),
        f"n = {norm_formula(record.block)}",
        f"{meaning} g is learned, one number per component.",
        array(record.calls[norm].result),
    )


def _writing(record: BlockRecord, part: str, norm: str, post_norm: str) -> Iterator[Step]:
    """The stream after a part has written to it."""
    block, name = record.block, f"stream after {_PARTS[part]}"
    if block.parallel is not None:
        if part == "ffn":
            meaning = "Both parts have read the same stream; their outputs are added to it together."
            yield Step("stream after the layer", ("T", "D"), "x ← x + y_attention + y_ffn", meaning, _end(record))
        return
    if block.norm_placement == "sandwich":
        meaning = "The output, brought to a common size before it is added."
        value = array(record.calls[post_norm].result)
        yield Step(f"normed output of {_PARTS[part]}", ("T", "D"), f"y ← {norm_formula(block, 'y')}", meaning, value)
    if part == "ffn":
        value = _end(record)
    elif block.norm_placement in ("post", "deepnorm"):
        value = array(record.calls[norm].result)
    else:
        value = array(record.calls["ffn_norm"].x)
    yield Step(name, ("T", "D"), _sum_formula(block), _sum_meaning(block), value)


_PARTS = {"attention": "attention", "ffn": "the feed-forward part"}


def _end(record: BlockRecord) -> np.ndarray:
    return array(record.calls["block"].result[0])


def _sum_formula(block: BlockConfig) -> str:
    if block.norm_placement == "post":
        return "x ← norm(x + y)"
    if block.norm_placement == "deepnorm":
        return f"x ← norm({(2 * block.n_layers) ** 0.25:.3g} x + y)"
    return "x ← x + y"


def _sum_meaning(block: BlockConfig) -> str:
    if block.norm_placement in ("pre", "sandwich"):
        return "What was there stays; the part adds its share."
    return f"The part adds its share, and the sum is brought to a common size: norm(x) = {norm_formula(block)}."
