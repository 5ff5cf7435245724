# %% [markdown]
# # A mixture of experts, from text to samples
#
# This notebook trains a small language model with a sparse mixture of experts, looks at how the experts share the
# work, lets the model write, and follows one sentence through it, step by step. It takes about a minute on a CPU, and
# runs in the same way on a GPU or a TPU.
#
# ## 1. Install
#
# A runtime's JAX is built for its accelerator, so it stays: a constraint tells pip not to replace it. Where it is too
# old or too new for `zoo`, the cell says what to do.
#
# In Colab, write the address of the repository that this notebook comes from into `REPOSITORY`. In a clone of the
# repository, leave it empty.

# %%
import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys
import tempfile

REPOSITORY = ""  # such as "https://.../zoo.git"
FIRST, BEYOND = (0, 10, 2), (0, 13)  # the versions of JAX that zoo works with


def installed(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def install():
    jax = installed("jax")
    if jax and not FIRST <= tuple(int(part) for part in jax.split(".")[:3] if part.isdigit()) < BEYOND:
        raise SystemExit(
            f"This runtime has JAX {jax}, and zoo needs 0.10.2 to 0.12. Choose another runtime version (in Colab: "
            'Runtime, Change runtime type), or run  pip install -U "jax[cuda13]>=0.10.2,<0.13"  (on a TPU jax[tpu], '
            "on a CPU jax) and restart the runtime."
        )
    kept = pathlib.Path(tempfile.gettempdir()) / "kept.txt"
    kept.write_text("".join(f"{name}=={installed(name)}\n" for name in ("jax", "jaxlib") if installed(name)))
    here = pathlib.Path.cwd()
    clone = next((folder for folder in (here, *here.parents) if (folder / "pyproject.toml").exists()), None)
    source = f"git+{REPOSITORY}" if REPOSITORY else str(clone)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-c", str(kept), source], check=True)
    assert installed("jax") == jax or jax is None


if importlib.util.find_spec("zoo") is None:
    install()

# %% [markdown]
# ## 2. What this runtime has
#
# JAX finds the accelerator by itself; nothing below names one. In Colab, Runtime, Change runtime type gives a GPU or a
# TPU. With several devices, `mesh=zoo.MeshConfig(data=1, fsdp=-1)` in the experiment splits the model over all of them.

# %%
import jax

for device in jax.devices():
    print(device.platform, device.device_kind)

# %%
advice = {
    "cpu": "A CPU: the sizes below suit it.",
    "gpu": 'A GPU: try a larger model, and compute_dtype="bfloat16" for its tensor cores.',
    "tpu": 'A TPU: try a larger model, compute_dtype="bfloat16" for its matrix units, and all its cores by the mesh.',
}
print(advice[jax.default_backend()])

# %% [markdown]
# ## 3. An experiment
#
# An experiment is data, a model and how to train it. Here the text is a part of Python's own standard library, which
# every runtime has; `path` may be any text. The model has two layers; in each, every token goes to 2 of 4 experts.

# %%
import asyncio

import zoo

STEPS = 120

experiment = zoo.Experiment(
    name="colab",
    data=zoo.DataConfig(path=str(pathlib.Path(asyncio.__file__).parent / "*.py"), vocab_size=512),
    model=zoo.ModelConfig(
        context_length=64,
        d_model=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        moe=zoo.SparseConfig(n_experts=4, top_k=2, d_ff=96),
        qk_norm="head",
        out_init="zero",
    ),
    optimizer=zoo.OptimizerConfig("muon", 4e-3, schedule="wsd", warmup_steps=5, decay_fraction=0.5, min_ratio=0.0),
    train=zoo.TrainConfig(steps=STEPS, batch_size=32, log_every=10, eval_every=STEPS // 2, save_every=STEPS),
)

# %% [markdown]
# ## 4. Train
#
# The run directory holds everything: config, tokenizer, checkpoints, metrics and pictures. Run the cell again, and it
# goes on where it stopped. After a change of the experiment, give it another `name`.

# %%
result = zoo.train(experiment)
result.validation["val/bits_per_byte"]

# %% [markdown]
# ## 5. Who does the work
#
# The load of every expert over the steps: 1 is an even share. Without the balance loss, a few experts would take all.

# %%
from IPython.display import Image, display

display(Image(result.directory / "loss.png", width=480))
display(Image(result.directory / "experts.png", width=640))

# %% [markdown]
# ## 6. Let it write
#
# A minute of training gives the look of Python, not yet its sense.

# %%
run = zoo.load(result.directory)
prompts = ["def ", "class "]
texts = zoo.generate(run, prompts, max_tokens=48, temperature=0.7)
for prompt, text in zip(prompts, texts, strict=True):
    print(prompt + text, end="\n---\n")

# %% [markdown]
# ## 7. One sentence through the model
#
# Every array of one forward pass, with its shape, its formula and what it is for; where each head looks, and which
# experts serve which token. Choose a token at the top of the page.

# %%
text = "async def wait(self):\n    return self._loop"
display(zoo.trace(run.model, run.params, text, run.tokenizer))

# %% [markdown]
# ## Where to go from here
#
# `zoo.preset("mixtral-8x7b")` is a published architecture as a config, and `zoo.preset("mixtral-8x7b", n_layers=2)`
# a shallow one. `moe=zoo.SoftConfig()` or `zoo.DenseConfig()` in the experiment are the other two mixtures.
# `zoo.check(zoo.build(config))` runs the laws of a causal decoder on a model. The README lists the rest.
