"""A whole decoder in NumPy float64, one row at a time, written from the formulas: no cache, no packing, no padding."""

import math

import numpy as np


def decoder(config, params, tokens):
    """Logits [T, V] of the tokens [T] of one row."""
    x = embedded(config, params["embedding"], np.asarray(tokens))
    for block, weights in blocks(config, params):
        x = decoder_block(block, weights, x)
    if config.norm_placement in ("pre", "sandwich"):
        x = norm(config, params["final_norm"], x)
    w = params["embedding"]["table"].T if config.tie_embeddings else params["head"]["w"]
    logits = (x @ w + (params["head"]["bias"] if config.head_bias else 0))[:, : config.vocab_size]
    return logits if config.logit_softcap is None else config.logit_softcap * np.tanh(logits / config.logit_softcap)


def blocks(config, params):
    """(config, parameters) of every block, in the order of the network."""
    for i, stage in enumerate(config.expand()):
        for repeat in range(stage.repeat):
            for j, block in enumerate(stage.blocks):
                yield block, _at(params[f"stage_{i}"][f"block_{j}"], repeat)


def _at(tree, i):
    return {name: _at(leaf, i) if isinstance(leaf, dict) else leaf[i] for name, leaf in tree.items()}


def embedded(config, p, tokens):
    x, t, D = p["table"][tokens], np.arange(len(tokens)), config.d_model
    x = x * math.sqrt(D) if config.embedding_scale else x
    if config.position == "learned":
        x = x + p["positions"][t + config.position_offset]
    if config.position == "sinusoidal":
        angle = t[:, None] / 10_000 ** (np.arange(0, D, 2) / D)
        x = x + np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(len(t), D)
    return norm(config, p["norm"], x) if config.embedding_norm else x


def norm(config, p, x):
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
    return x * (p["scale"].reshape(-1) + config.norm_unit_offset) + p.get("bias", 0)


def decoder_block(b, p, x):
    def normed(name, x):
        return norm(b, p[name], x)

    def feed(x):
        return ffn(b, p["ffn"], x) if b.moe is None else sparse(b, p["moe"], x)

    parts = {"attention": lambda x: attention(b, p["attention"], x), "ffn": feed}
    if b.parallel:
        second = "attention_norm" if b.parallel == "one_norm" else "ffn_norm"
        return x + parts["attention"](normed("attention_norm", x)) + feed(normed(second, x))
    for name, part in parts.items():
        if b.norm_placement == "pre":
            x = x + part(normed(f"{name}_norm", x))
        elif b.norm_placement == "sandwich":
            x = x + normed(f"{name}_post_norm", part(normed(f"{name}_norm", x)))
        else:
            alpha = (2 * b.n_layers) ** 0.25 if b.norm_placement == "deepnorm" else 1
            x = normed(f"{name}_norm", alpha * x + part(x))
    return x


def attention(b, p, x):
    T, G = len(x), b.n_heads // b.n_kv_heads
    t = np.arange(T)
    q, k, v = (np.einsum("TD,DNh->NTh", x, p[f"w_{n}"]) + p.get(f"b_{n}", np.zeros(1))[:, None] for n in "qkv")
    if b.qk_norm == "head":
        q, k = norm(b, p["q_norm"], q), norm(b, p["k_norm"], k)
    if b.qk_norm == "full":
        q, k = (_split(norm(b, p[f"{n}_norm"], _joined(y)), len(y)) for n, y in (("q", q), ("k", k)))
    if b.position == "rope":
        q, k = turned(b, q), turned(b, k)
    scores = b.attention_scale * q @ np.repeat(k, G, axis=0).swapaxes(1, 2)
    if b.attention_softcap is not None:
        scores = b.attention_softcap * np.tanh(scores / b.attention_softcap)
    distance = t[:, None] - t
    if b.position == "alibi":
        scores = scores - slopes(b.n_heads)[:, None, None] * distance
    seen = (distance >= 0) & (distance < (b.window or T))
    raised = np.where(seen, np.exp(scores), 0)
    sinks = np.exp(p["sinks"])[:, None, None] if b.attention_sinks else 0
    out = raised / (raised.sum(-1, keepdims=True) + sinks) @ np.repeat(v, G, axis=0)
    return np.einsum("HTh,HhD->TD", out, p["w_o"]) + p.get("b_o", 0)


def _joined(heads):
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)


def _split(x, n):
    return x.reshape(len(x), n, -1).swapaxes(0, 1)


def turned(b, x):
    """RoPE on the first rotary_dim components of heads [N, T, h], as complex numbers."""
    n = b.rotary_dim
    turn = np.exp(1j * np.arange(x.shape[1])[:, None] * b.rope_theta ** (-np.arange(0, n, 2) / n))
    y = x.copy()
    first, second = (slice(0, n, 2), slice(1, n, 2)) if b.rope_interleaved else (slice(0, n // 2), slice(n // 2, n))
    pairs = (x[..., first] + 1j * x[..., second]) * turn
    y[..., first], y[..., second] = pairs.real, pairs.imag
    return y


def slopes(n_heads):
    """ALiBi's 2^(-8i/n) for n heads, a power of 2; of more heads, the rest are the odd ones for 2n."""
    n = 2 ** int(math.log2(n_heads))
    own = 2.0 ** (-8 * np.arange(1, n + 1) / n)
    between = 2.0 ** (-8 * np.arange(1, 2 * n + 1, 2) / (2 * n))
    return np.concatenate([own, between])[:n_heads]


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "swish": lambda x: x / (1 + np.exp(-1.702 * x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}


def ffn(b, p, x):
    act, up = ACTIVATIONS[b.activation], x @ p["w_up"] + p.get("b_up", 0)
    if not b.glu:
        hidden = act(up)
    else:
        gate = x @ p["w_gate"] + p.get("b_gate", 0)
        if b.glu_clamp is not None:
            gate, up = np.minimum(gate, b.glu_clamp), np.clip(up, -b.glu_clamp, b.glu_clamp) + 1
        hidden = act(gate) * up
    return hidden @ p["w_down"] + p.get("b_down", 0)


def sparse(b, p, x):
    """The k likeliest experts of every token, weighted by a softmax over their logits."""
    logits = x @ p["router"]["w"] + p["router"].get("bias", 0)
    experts = [_at({name: w for name, w in p.items() if name != "router"}, e) for e in range(b.moe.n_experts)]
    y = np.zeros_like(x)
    for t, row in enumerate(logits):
        chosen = np.argsort(-row)[: b.moe.top_k]
        weights = np.exp(row[chosen]) / np.exp(row[chosen]).sum()
        y[t] = sum(w * ffn(b, experts[e], x[t]) for w, e in zip(weights, chosen, strict=True))
    return y
