"""What a run is made of, put together and checked before anything is compiled."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from zoo.config import Experiment
from zoo.data.cache import Corpus, prepare
from zoo.data.loader import Loader, evaluation_batches
from zoo.describe import count_parameters
from zoo.infer.generate import PromptError, room
from zoo.models.decoder import Decoder, build
from zoo.parallel.attention import MeshAttention
from zoo.parallel.distributed import agree, process_rows
from zoo.parallel.experts import MeshExperts
from zoo.parallel.mesh import make_mesh
from zoo.parallel.rules import check_batch, make_constrain, report
from zoo.rundir import Record, Run, RunDir, RunError, make_record, open_run, with_vocabulary
from zoo.train.metrics import Screen, short
from zoo.train.optimizer import make_optimizer
from zoo.train.state import Layout, make_layout
from zoo.train.wandb import check_wandb


class Parts(NamedTuple):
    """What a run is made of. `experiment` has the vocabulary size set, that of `record` is as it was asked for."""

    experiment: Experiment
    record: Record
    directory: RunDir
    corpus: Corpus
    loader: Loader
    mesh: Mesh
    model: Decoder
    specs: PyTree[Any]
    optimizer: optax.GradientTransformation
    layout: Layout


def assemble(experiment: Experiment) -> Parts:
    """Everything that can be checked before compiling: directory, text, model, mesh; raises as `train` does."""
    check_wandb(experiment.train)
    directory = open_run(experiment)
    corpus = prepare(experiment.data, directory.open_tokenizer())
    record = make_record(experiment, corpus)
    experiment = with_vocabulary(experiment, corpus.tokenizer.vocab_size)
    settings = experiment.train
    mesh = make_mesh(experiment.mesh)
    parts = f"{settings.named('batch_size')} in {settings.named('micro_batches')} parts"
    check_batch(parts, settings.batch_size // settings.micro_batches, mesh)
    model = build(experiment.model, make_constrain(mesh), MeshExperts(mesh), MeshAttention(mesh))
    _check_prompt(Run(model, None, corpus.tokenizer, experiment))
    specs = model.abstract_params()
    optimizer = make_optimizer(experiment.optimizer, specs)
    layout = make_layout(specs, optimizer, mesh, experiment.mesh.zero, experiment.optimizer.ema_decay is not None)
    rows = process_rows(settings.batch_size, mesh)
    loader = Loader(
        corpus.train,
        batch_size=settings.batch_size,
        seed=settings.seed,
        weights=[source.weight for source in experiment.data.sources],
        truncated=experiment.data.documents == "truncated",
        rows=rows,
        **windows(experiment),
    )
    evaluation_batches(corpus.validation, batch_size=1, **windows(experiment))  # checks the text
    return Parts(experiment, record, directory, corpus, loader, mesh, model, specs, optimizer, layout)


def windows(experiment: Experiment) -> dict[str, Any]:
    """How text is cut into windows for a model."""
    model = experiment.model
    most = getattr(model.moe, "max_documents", None)
    return {"length": model.context_length, "vocab_size": model.vocab_size, "max_documents": most}


def _check_prompt(run: Run) -> None:
    """Before training rather than at the first sample."""
    settings = run.config.train
    try:
        if settings.sample_every is not None:
            room(run, settings.sample_prompt)
    except PromptError as error:
        settings.require(False, "sample_prompt", f"cannot be gone on from: {error}")


@contextmanager
def begun(parts: Parts) -> Iterator[None]:
    """Makes the run directory, or checks that it goes with the text, and holds it: process 0 does, for all.

    Raises:
        RunError: as RunDir.held and RunDir.begin do; on every process.
    """
    problem = None
    with ExitStack() as stack:
        if jax.process_index() == 0:
            try:
                stack.enter_context(parts.directory.held())
                parts.directory.begin(parts.record, parts.corpus.tokenizer)
            except RunError as error:
                problem = error
        if not agree(problem is None):
            raise problem or RunError(f"process 0 cannot use {parts.directory.path}; its own message says why")
        yield


def introduce(parts: Parts, screen: Screen) -> None:
    """The first lines on the screen: what is trained, on what, and where it goes."""
    experiment, corpus = parts.experiment, parts.corpus
    count = count_parameters(experiment.model, parts.specs)
    mixture = f"{experiment.model.moe.kind} mixture of experts" if experiment.model.moe else "no mixture of experts"
    active = f" ({short(count.active)} active)" if count.active != count.total else ""
    screen.say(f"{experiment.name}: {short(count.total)} parameters{active}, {mixture}")
    train, validation = (short(len(part.tokens)) for part in (corpus.train, corpus.validation))
    per_token = corpus.train.text_bytes / len(corpus.train.tokens)
    screen.say(f"{train} training and {validation} validation tokens of {per_token:.2f} bytes")
    devices = f"{parts.mesh.size} {parts.mesh.devices.flat[0].device_kind}"
    screen.say(f"{devices}; {report(parts.specs, parts.mesh, experiment.mesh.zero)}")
    screen.say(f"everything goes to {parts.directory.path}")
