"""Attention, step by step."""

from collections.abc import Iterator

import numpy as np

from zoo.config import BlockConfig
from zoo.trace.recorder import BlockRecord
from zoo.trace.result import Looks, Step
from zoo.trace.words import array, read_by


def looks_of(record: BlockRecord) -> Looks:
    """The mask and the weights of a block's attention."""
    return Looks(array(record.attended.visible), array(record.attended.weights))


def attention_steps(record: BlockRecord, looks: Looks) -> Iterator[Step]:
    """From queries to the output of attention."""
    block, found = record.block, record.attended
    read = read_by(block)
    yield Step("queries", ("T", "H", "h"), _projected(block, "q", read), _QUERIES + _turned(block), array(found.q))
    yield Step("keys", ("T", "K", "h"), _projected(block, "k", read), _KEYS + _shared_heads(block), array(found.k))
    yield Step("values", ("T", "K", "h"), _projected(block, "v", read), _VALUES, array(found.v))
    yield Step("scores", ("H", "T", "T"), _score_formula(block), _score_meaning(block), array(found.scores))
    yield Step("mask", ("T", "T"), _mask_formula(block), _mask_meaning(block), looks.visible)
    yield Step("attention weights", ("H", "T", "T"), *_weights_words(block), looks.weights)
    yield Step("heads", ("T", "H", "h"), "o_i = Σ_j a_ij v_j", _HEADS, array(found.out))
    bias = " + b_o" if "o" in block.attention_bias else ""
    yield Step("attention output", ("T", "D"), f"y = o W_o{bias}", _OUTPUT, array(record.calls["attention"].result[0]))


_QUERIES = "What each token looks for, once per head."
_KEYS = "By what each token can be found."
_VALUES = "What each token hands to those who look at it."
_HEADS = "Each head's mean of the values, weighted by where the token looks: how tokens learn of one another."
_OUTPUT = "All heads mixed into one vector per token, to be added to the stream."


def _projected(block: BlockConfig, letter: str, read: str) -> str:
    formula = f"{read} W_{letter}" + (f" + b_{letter}" if letter in block.attention_bias else "")
    if letter == "v":
        return f"v = {formula}"
    formula = f"norm({formula})" if block.qk_norm else formula
    return f"{letter}_t = R_t ({formula})" if block.position == "rope" else f"{letter} = {formula}"


def _turned(block: BlockConfig) -> str:
    if block.position != "rope":
        return ""
    share = "" if block.rotary_dim == block.head_dim else f" {block.rotary_dim} of its {block.head_dim} numbers,"
    return (
        f" R_t turns{share} pairs of numbers by angles that grow with the position t, so that q·k knows the distance."
    )


def _shared_heads(block: BlockConfig) -> str:
    group = block.n_heads // block.n_kv_heads
    return "" if group == 1 else f" Each of these heads serves {group} query heads."


def _mask_formula(block: BlockConfig) -> str:
    return "j ≤ i" if block.window is None else f"i − {block.window} < j ≤ i"


def _mask_meaning(block: BlockConfig) -> str:
    before = "itself and all before it" if block.window is None else f"the last {block.window} tokens, itself included"
    return f"Whether token i (row) may look at token j (column): {before}, never ahead."


def _score_formula(block: BlockConfig) -> str:
    usual = np.isclose(block.attention_scale, block.head_dim**-0.5)
    score = "q_i·k_j / √h" if usual else f"{block.attention_scale:.3g} q_i·k_j"
    if block.attention_softcap is not None:
        score = f"{block.attention_softcap:g} tanh({score} / {block.attention_softcap:g})"
    return f"s_ij = {score}" + (" − m (i − j)" if block.position == "alibi" else "")


def _score_meaning(block: BlockConfig) -> str:
    meaning = "How well the query of token i (row) fits the key of token j (column)."
    if block.attention_softcap is not None:
        meaning += f" tanh keeps it within ±{block.attention_softcap:g}."
    return meaning + (" m, another number for each head, makes distance cost." if block.position == "alibi" else "")


def _weights_words(block: BlockConfig) -> tuple[str, str]:
    """Formula and meaning."""
    meaning = "The scores as shares of 1 over the tokens j that i may see: how much token i looks at token j."
    if not block.attention_sinks:
        return "a_ij = exp(s_ij) / Σ_j' exp(s_ij')", meaning
    meaning += " The sink, one learned score per head, takes a share and hands over nothing."
    return "a_ij = exp(s_ij) / (exp(sink) + Σ_j' exp(s_ij'))", meaning
