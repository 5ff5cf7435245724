"""A model and batches small enough to train in a test."""

import jax.numpy as jnp
import numpy as np

from zoo.config import Experiment, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig, as_mixture
from zoo.data.loader import Batch
from zoo.models.decoder import build
from zoo.parallel.attention import MeshAttention
from zoo.parallel.experts import MeshExperts
from zoo.parallel.mesh import make_mesh
from zoo.parallel.rules import make_constrain
from zoo.train.optimizer import make_optimizer
from zoo.train.state import fresh_state, make_layout
from zoo.train.step import make_train_step

V, T = 32, 16


def model_config(mixture="sparse", **settings):
    sizes = {"n_experts": 4, "d_ff": 16, "balance_weight": 0.1, "z_weight": 0.01}
    moe = as_mixture(None, mixture)
    if moe is not None:
        special = {"segment_length": 4} if mixture == "soft" else {}
        moe = type(moe)(**sizes | special | settings.pop("moe", {}))
    shape = {"vocab_size": V, "context_length": T, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32}
    return ModelConfig(moe=moe, **shape | settings)


def experiment(mixture="sparse", model=None, optimizer=None, train=None, mesh=None):
    """Settings for a run on one device of this process, unless `mesh` says otherwise."""
    return Experiment(
        name="tiny",
        model=model_config(mixture, **model or {}),
        optimizer=OptimizerConfig(**{"warmup_steps": 2, "learning_rate": 1e-2} | (optimizer or {})),
        train=TrainConfig(**{"steps": 20, "batch_size": 8} | (train or {})),
        mesh=MeshConfig(**{"data": 1} | (mesh or {})),
    )


class Setup:
    """What the loop puts together for an experiment: model, mesh, optimizer, layout and compiled step."""

    def __init__(self, settings, devices):
        self.settings = settings
        self.mesh = make_mesh(settings.mesh, devices)
        self.model = build(settings.model, make_constrain(self.mesh), MeshExperts(self.mesh), MeshAttention(self.mesh))
        self.specs = self.model.abstract_params()
        self.optimizer = make_optimizer(settings.optimizer, self.specs)
        ema = settings.optimizer.ema_decay is not None
        self.layout = make_layout(self.specs, self.optimizer, self.mesh, settings.mesh.zero, ema)
        self.step = make_train_step(self.model, settings, self.optimizer, self.layout)

    def state(self):
        return fresh_state(self.model, self.optimizer, self.layout, self.settings.train.seed)

    def run(self, n_steps, state=None):
        """State after n more steps, and the loss of each."""
        state, losses = self.state() if state is None else state, []
        for _ in range(n_steps):
            state, metrics = self.step(state, batch(int(state.step), self.settings.train.batch_size))
            losses.append(float(metrics["train/loss"]))
        return state, losses


def batch(seed, rows=8):
    """Rows of two documents and padding, all of different lengths, so micro-batches differ in their tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (rows, T)).astype(np.int32)
    lengths = rng.integers(3, T + 1, rows)
    first = rng.integers(1, lengths)
    at = np.arange(T)[None]
    segments = np.where(at < first[:, None], 1, np.where(at < lengths[:, None], 2, 0)).astype(np.int32)
    positions = np.where(segments == 2, at - first[:, None], at).astype(np.int32)
    following = np.roll(segments, -1, 1)
    following[:, -1] = 0
    labels = np.where((segments > 0) & (segments == following), np.roll(tokens, -1, 1), -1).astype(np.int32)
    return Batch(*map(jnp.asarray, (tokens, labels, positions, segments)))
