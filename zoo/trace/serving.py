"""The feed-forward part, step by step: a plain network, or a mixture of experts."""

from collections.abc import Iterator

import jax
import numpy as np

from zoo.config import BlockConfig, SparseConfig
from zoo.trace.recorder import BlockRecord
from zoo.trace.result import Experts, Step
from zoo.trace.words import array, read_by

# How activations are written, of z.
ACTIVATIONS = {
    "sigmoid": "σ({})",
    "relu": "max(0, {})",
    "relu2": "max(0, {})²",
    "gelu": "gelu({})",
    "gelu_tanh": "gelu({})",
    "silu": "silu({})",
    "swish": "swish({})",
    "swish_learned": "swish({})",
}


def experts_of(record: BlockRecord) -> Experts | None:
    """Who serves the tokens of a block."""
    moe = record.block.moe
    if moe is None:
        return None
    names = [f"expert {e}" for e in range(moe.n_experts)]
    if moe.kind == "sparse":
        names += [f"null {e}" for e in range(moe.n_null_experts)]
        indices, weights = map(np.asarray, record.sent)
        chosen = indices[..., None] == np.arange(len(names))
        return Experts("sparse", np.sum(chosen * weights[..., None], axis=1), np.any(chosen, axis=1), tuple(names))
    if moe.kind == "dense":
        weights = np.asarray(jax.nn.softmax(_router_logits(record), axis=-1))
    else:
        segments = np.asarray(jax.nn.softmax(array(record.calls["moe/merging"].result), axis=-1))
        weights = segments[np.arange(len(array(record.attended.q))) // moe.segment_length]
    return Experts(moe.kind, weights, np.ones_like(weights, bool), tuple(names))


def ffn_steps(record: BlockRecord) -> Iterator[Step]:
    """Hidden units and output of a plain FFN."""
    block = record.block
    read = read_by(block)
    meaning = "Each token on its own, in a wider space: units that answer to patterns of the stream."
    yield Step("hidden units", ("T", "F"), f"u = {_hidden_formula(block, read)}", meaning, array(record.hidden))
    bias = " + b_down" if block.ffn_bias else ""
    meaning = "What the units that answered have to say, to be added to the stream."
    yield Step("output", ("T", "D"), f"y = u W_down{bias}", meaning, array(record.calls["ffn"].result))


def _hidden_formula(block: BlockConfig, read: str) -> str:
    gate, up = ((f"{read} W_{name}" + (f" + b_{name}" if block.ffn_bias else "")) for name in ("gate", "up"))
    act = ACTIVATIONS[block.activation]
    if not block.glu:
        return act.format(up)
    if block.glu_clamp is not None:
        c = f"{block.glu_clamp:g}"
        return f"{act.format(f'min({gate}, {c})')} · (clip({up}, −{c}, {c}) + 1)"
    return f"{act.format(gate)} · ({up})"


def mixture_steps(record: BlockRecord, experts: Experts) -> Iterator[Step]:
    """From the router to the output of a mixture."""
    moe = record.block.moe
    read = read_by(record.block)
    if experts.kind == "soft":
        yield _merging(record, experts, read)
    else:
        yield from _routing(record, experts, read)
    formula = f"FFN_θ({read})" if experts.kind == "soft" else f"Σ_e w_e FFN_e({read})"
    units = _hidden_formula(record.block, read)
    meaning = f"What the experts say, weighted. FFN_e is a network u = {units}, y = u W_down, of its own matrices."
    if moe.n_shared_experts:
        formula += f" + σ({read} w_s) FFN_shared({read})" if moe.shared_gate else f" + FFN_shared({read})"
        who = (
            "A shared one serves" if moe.n_shared_experts == 1 else f"{moe.n_shared_experts} shared ones, as one, serve"
        )
        meaning += f" {who} every token."
    yield Step("mixture output", ("T", "D"), f"y = {formula}", meaning, array(record.calls["moe"].result[0]))


def _merging(record: BlockRecord, experts: Experts, read: str) -> Step:
    length = record.block.moe.segment_length
    return Step(
        "mixing weights",
        ("T", "E"),
        f"w = softmax(standardize(mean {read} of the segment before) W_r + b);  θ = Σ_e w_e θ_e",
        f"{length} tokens at a time share one expert, whose parameters θ are the weighted mean of all experts'. The "
        "segment before decides, so that nobody sees ahead; the first has learned weights.",
        experts.weights,
    )


def _router_logits(record: BlockRecord) -> np.ndarray:
    """[T, E] raw logits of a sparse or dense mixture."""
    found = record.calls["moe/router"].result
    return array(found[0].raw if isinstance(found, tuple) else found)


def _routing(record: BlockRecord, experts: Experts, read: str) -> Iterator[Step]:
    moe = record.block.moe
    bias = " + b" if getattr(moe, "router_bias", False) else ""
    meaning = "One score per expert: how well the token suits it. Computed in float32."
    yield Step("router logits", ("T", "E"), f"r = {read} W_r{bias}", meaning, _router_logits(record))
    if not isinstance(moe, SparseConfig):
        meaning = "Every token goes to every expert, with these weights."
        yield Step("expert weights", ("T", "E"), "w = softmax(r)", meaning, experts.weights)
        return
    indices, weights = record.sent
    yield Step("chosen experts", ("T", "k"), _choice_formula(moe), _choice_meaning(moe), np.asarray(indices))
    meaning = "How much each chosen expert's output counts; all others are not even computed."
    yield Step("expert weights", ("T", "k"), _weight_formula(moe), meaning, np.asarray(weights))


def _choice_formula(moe: SparseConfig) -> str:
    ranked = "σ(r)" if moe.score == "sigmoid" else "r"
    if moe.selection_bias:
        ranked = ("σ(r)" if moe.score == "sigmoid" else "softmax(r)") + " + selection bias"
    return f"the {moe.k} largest of {ranked}"


def _choice_meaning(moe: SparseConfig) -> str:
    meaning = "Each token's experts, the best first."
    if moe.top_groups is not None:
        rule = "best expert" if moe.group_score == "max" else "two best experts together"
        meaning += f" Only those of its {moe.top_groups} best of {moe.n_groups} groups, by their {rule}, can be chosen."
    if moe.n_null_experts:
        meaning += f" Numbers from {moe.n_experts} on are null experts, which compute nothing."
    return meaning + (" The bias evens out the load and is no part of the weights." if moe.selection_bias else "")


def _weight_formula(moe: SparseConfig) -> str:
    scores = "σ(r)" if moe.score == "sigmoid" else "softmax(r)"
    chosen = "Σ_chosen experts that compute p" if moe.n_null_experts else "Σ_chosen p"
    formula = f"p = {scores};  w = p / {chosen}" if moe.renormalizes else f"w = {scores}"
    formula += ", 0 for null experts" if moe.n_null_experts else ""
    return formula + (f" · {moe.routed_scale:g}" if moe.routed_scale != 1 else "")
