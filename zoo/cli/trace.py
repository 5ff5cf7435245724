"""zoo trace: one sentence through a model, as text on the screen or as a page in a file."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.cli.experiment_file import load_experiment
from zoo.cli.options import OptionError, parse
from zoo.config import ModelConfig

# The longest text for a small model, in bytes; a page with more has pictures that nobody can read.
CONTEXT = 256


@dataclass(frozen=True)
class Trace:
    """Show every step of one sentence's way through a model: each array with its shape, formula and meaning.

    Attributes:
        preset: a published architecture, made small, with random weights and bytes as tokens.
        config: a Python file that defines `config = Experiment(...)`; its model, made small in the same way.
        model: a run directory; its trained weights and its tokenizer.
        text: the sentence.
        html: write a page to this file, instead of a text to the screen.
        layers: show the first layers only, this many; None for all.
        seed: of the random weights, at least 0 and less than 2^32.
    """

    preset: str | None = None
    config: str | None = None
    model: str | None = None
    text: str | None = None
    html: str | None = None
    layers: int | None = None
    seed: int = 0


def trace(args: Sequence[str]) -> int:
    """`zoo trace`."""
    given = parse(Trace(), args, "zoo trace")
    _check(given)
    page = None if given.html is None else _writable(Path(given.html))
    found = _trained(given.model, given.text) if given.model is not None else _small(given)
    if page is None:
        print(found.text(given.layers), end="")
    else:
        page.write_text(found.html(given.layers), encoding="utf-8")
        print(f"{page}: open it in a browser")
    return 0


def _check(given: Trace) -> None:
    if sum(name is not None for name in (given.preset, given.config, given.model)) != 1:
        raise OptionError("zoo trace needs one of --preset NAME, --model RUN_DIR and --config FILE")
    if given.text is None:
        raise OptionError('zoo trace needs --text "...", the sentence')
    if given.layers is not None and given.layers < 1:
        raise OptionError(f"--layers {given.layers} must be at least 1")
    if given.model is not None and given.seed != Trace.seed:
        raise OptionError(f"--seed {given.seed} is of random weights, and those of --model {given.model} are trained")
    if not 0 <= given.seed < 2**32:
        raise OptionError(f"--seed {given.seed} must be at least 0 and less than 2^32")


def _writable(path: Path) -> Path:
    """The path of a page; what is no page stays what it is."""
    if path.is_dir():
        raise OptionError(f"--html {path} is a folder; give the name of a file in it")
    if path.exists() and "zoo trace" not in path.read_text(encoding="utf-8", errors="replace")[:500]:
        raise OptionError(f"--html {path} exists and is no page of zoo trace; choose another name")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"--html {path}: there is no folder {path.parent}; make it, or choose another name")
    return path


def _trained(directory: str, text: str) -> Any:
    """The trace of a trained model, which begins a text as its documents began in training."""
    from zoo.rundir import load
    from zoo.trace import trace as run

    found = load(directory)
    start = [found.tokenizer.bos_id] if found.config.data.add_bos else []
    tokens = start + found.tokenizer.encode(text)
    return run(found.model, found.params, tokens, found.tokenizer, note=f"The trained model of {directory}.")


def _small(given: Trace) -> Any:
    """The trace of a small model with random weights."""
    import jax
    import jax.numpy as jnp

    from zoo.data.tokenizer import ByteTokenizer
    from zoo.models.decoder import build
    from zoo.models.presets import preset
    from zoo.trace import trace as run

    full = load_experiment(given.config).model if given.preset is None else preset(given.preset)
    tokenizer = ByteTokenizer()
    small = shrunk(full, tokenizer.vocab_size)
    model = build(small)
    params = jax.jit(model.init)(jax.random.key(given.seed), jnp.zeros((1, 1), jnp.int32))["params"]
    return run(model, params, given.text, tokenizer, note=_note(given.preset or given.config, full, small))


def shrunk(full: ModelConfig, vocab_size: int) -> ModelConfig:
    """A small model of the same structure, in float32, whose random weights do not fade its numbers out."""
    from zoo.laws import reduced

    small = reduced(full)
    return dataclasses.replace(
        small,
        vocab_size=vocab_size,
        context_length=min(full.context_length, CONTEXT),
        init="scaled_normal",
        init_std=small.d_model**-0.5,
        out_init="same",
        param_dtype="float32",
        compute_dtype="float32",
    )


def _note(name: str, full: ModelConfig, small: ModelConfig) -> str:
    changes = [
        f"D is {small.d_model} instead of {full.d_model:,}",
        f"{small.n_layers} layers instead of {full.n_layers}",
    ]
    if full.moe is not None:
        changes.append(f"{small.moe.n_experts} experts instead of {full.moe.n_experts}")
    return (
        f"{name} made small: {', '.join(changes)}. Its structure is that of the original; its weights are random and "
        "its tokens are bytes, so the numbers show how it computes and not what it knows."
    )
