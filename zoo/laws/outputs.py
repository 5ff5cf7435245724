"""Laws 1 to 5: what the output of a token may depend on."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from zoo.data.loader import Batch
from zoo.laws.case import Case, Finding, equal, equal_trees, worst
from zoo.models.decoder import Cache
from zoo.objectives import Sums


def causality(case: Case) -> Finding:
    """Changing a token changes no output before it, at evaluation and in training."""
    return worst([_causality(case, deterministic=True), _causality(case, deterministic=False)])


def _causality(case: Case, deterministic: bool) -> Finding:
    tokens = case.tokens(1)
    changed = np.unique(np.linspace(0, case.length - 1, 16).astype(int))

    def logits(row: Array) -> Array:
        return case.model.apply({"params": case.params}, row[None], deterministic=deterministic).logits[0]

    rows = jnp.repeat(tokens, len(changed) + 1, axis=0)
    other = (rows[0, changed] + 1) % case.model.config.vocab_size
    rows = rows.at[jnp.arange(len(changed)), changed].set(other)
    *outputs, base = jax.jit(lambda rows: jax.lax.map(logits, rows))(rows)
    mode = "at evaluation" if deterministic else "in training"
    return worst(
        [
            equal(base[:t], out[:t], lambda where, t=t: f"{mode}, changing token {t} changes the output at {where[0]}")
            for t, out in zip(changed.tolist(), outputs, strict=True)
        ]
    )


def padding(case: Case) -> Finding:
    """Padding changes no output of a real token, nor any sum of loss and routing statistics, wherever it stands."""
    n = min(case.length, max(2, 2 * case.length // 3))
    alone = case.batch([[n]])
    document = jax.tree.map(lambda x: x[:, :n], alone)
    inside = np.sort(np.random.default_rng(case.seed).permutation(case.length)[:n])
    places = {"after": np.arange(n), "before": np.arange(case.length - n, case.length), "between": inside}
    return worst([_padded(case, document, place, slots) for place, slots in places.items()])


def _padded(case: Case, document: Batch, place: str, slots: np.ndarray) -> Finding:
    """Compares a document with a row that has its tokens in `slots` and padding, of arbitrary tokens, elsewhere."""
    empty = case.batch([[]], salt=1)
    row = jax.tree.map(lambda fill, values: fill.at[:, slots].set(values), empty, document)
    own, padded = (_outputs(case, batch) for batch in (document, row))
    tokens = f"with padding {place} the tokens"
    return worst(
        [
            equal(own[0][0], padded[0][0, slots], lambda at: f"{tokens}, the output of token {at[0]} changes"),
            equal_trees(own[1], padded[1], f"{tokens}, loss or routing statistics"),
        ]
    )


def _outputs(case: Case, batch: Batch) -> tuple[Array, Sums]:
    logits = case.logits(batch.tokens, None, batch.segment_ids)  # positions as the model finds them
    return logits, case.sums(batch)


def packing(case: Case) -> Finding:
    """Documents packed into one row give what each gives alone."""
    shares = np.random.default_rng(case.seed).dirichlet(np.ones(case.max_documents))
    lengths = np.maximum(1, (shares * (case.length - case.max_documents)).astype(int)).tolist()
    packed = case.batch([lengths])
    together = case.logits(packed.tokens, packed.positions, packed.segment_ids)[0]
    findings, start = [], 0
    for i, length in enumerate(lengths):
        alone = case.batch([[length]])
        tokens = jnp.roll(packed.tokens, -start, axis=1)  # what follows the document is padding here
        own = case.logits(tokens, alone.positions, alone.segment_ids)[0, :length]
        findings.append(
            equal(
                own,
                together[start : start + length],
                lambda where, i=i: f"the output of token {where[0]} of document {i} differs from the document alone",
            )
        )
        start += length
    return worst(findings)


def batch(case: Case) -> Finding:
    """At evaluation a row's outputs do not depend on the other rows."""
    tokens = case.tokens(4)
    together = case.logits(tokens)
    alone = jnp.concatenate([case.logits(tokens[i : i + 1]) for i in range(len(tokens))])
    return equal(alone, together, lambda where: f"row {where[0]} in a batch differs from the row alone at {where[1]}")


def cache(case: Case) -> Finding:
    """Prefill and then one token at a time equal the full forward pass, at every split."""
    tokens = case.tokens(2)
    full = case.logits(tokens)
    splits = jnp.arange(case.length + 1)
    # The rows of a batch are split at different places, as prompts of different lengths are.
    both = jnp.stack([splits, (splits * 7 + 3) % (case.length + 1)], axis=1)
    generated = jax.jit(lambda both: jax.lax.map(lambda split: _generate(case, tokens, split), both))(both)
    return worst(
        [
            equal(
                full,
                out,
                lambda where, split=split: f"prefilled with {split[where[0]]} tokens, the output at {where[1]} differs",
            )
            for split, out in zip(both.tolist(), generated, strict=True)
        ]
    )


def _generate(case: Case, tokens: Array, split: Array) -> Array:
    """Logits of every token from a prefill of `split` tokens of each row and one-token steps for the rest."""
    B, T = tokens.shape
    real = jnp.arange(T) < split[:, None]
    variables = {"params": case.params}
    first = case.model.apply(
        variables, tokens, segment_ids=real.astype(jnp.int32), cache=case.model.init_cache(B, case.length)
    )

    def step(cache: Cache, _: None) -> tuple[Cache, tuple[Array, Array]]:
        at = jnp.minimum(cache.length, T - 1)
        segments = (cache.length < T).astype(jnp.int32)[:, None]  # a row that is done goes on as padding
        token = jnp.take_along_axis(tokens, at[:, None], axis=1)
        out = case.model.apply(variables, token, segment_ids=segments, cache=cache)
        return out.cache, (jnp.where(segments[:, 0] > 0, at, T), out.logits[:, 0])

    _, (at, logits) = jax.lax.scan(step, first.cache, length=T)
    return first.logits.at[jnp.arange(B), at].set(logits, mode="drop")
