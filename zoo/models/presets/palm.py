"""PaLM: one key and value head, attention and SwiGLU side by side behind one norm, no biases."""

from zoo.config import ModelConfig
from zoo.models.presets.preset import Preset, Recipe

PRESETS = {
    "palm-540b": Preset(
        ModelConfig(
            vocab_size=256000,
            context_length=2048,
            d_model=18432,
            n_layers=118,
            n_heads=48,
            n_kv_heads=1,
            head_dim=256,
            d_ff=4 * 18432,
            norm="layernorm",
            norm_scale=False,
            parallel="one_norm",
            # The paper's embeddings are N(0, 1) and its logits divided by sqrt(D): a table of deviation
            # 1 / sqrt(D), multiplied by sqrt(D) on the way in, is the same.
            embedding_scale=True,
            init="scaled_normal",
            init_std=18432**-0.5,
            logit_z_weight=1e-4,
            compute_dtype="bfloat16",
        ),
        "arXiv 2204.02311, table 1 and sections 2 and 5",
        Recipe(learning_rate=1e-2, batch_tokens=4e6, tokens=780e9),
        "The exact count, 540,354,281,472, is derived from the published shapes: matrices and table, which is the "
        "paper's 540.35 B. It leaves out scales of norms (2,193,408 with one each), and norm_eps is not published.",
    ),
}
