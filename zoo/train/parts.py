"""What a run is made of, put together and checked before anything is compiled."""

from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from zoo.config import Experiment
from zoo.data.cache import Corpus, prepare
from zoo.data.loader import Loader, evaluation_batches
from zoo.describe import count_parameters
from zoo.models.decoder import Decoder, build
from zoo.parallel.distributed import barrier, process_rows
from zoo.parallel.experts import MeshExperts
from zoo.parallel.mesh import make_mesh
from zoo.parallel.rules import check_batch, make_constrain, report
from zoo.rundir import Record, RunDir, open_run, with_vocabulary
from zoo.train.metrics import Screen, short
from zoo.train.optimizer import make_optimizer
from zoo.train.state import Layout, make_layout


class Parts(NamedTuple):
    """What a run is made of. `experiment` has the vocabulary size set."""

    experiment: Experiment
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
    directory = open_run(experiment)
    corpus = prepare(experiment.data, directory.open_tokenizer())
    experiment = with_vocabulary(experiment, corpus.tokenizer.vocab_size)
    settings = experiment.train
    mesh = make_mesh(experiment.mesh)
    parts = f"{settings.named('batch_size')} in {settings.named('micro_batches')} parts"
    check_batch(parts, settings.batch_size // settings.micro_batches, mesh)
    _check_prompt(experiment, corpus)
    model = build(experiment.model, make_constrain(mesh), MeshExperts(mesh))
    specs = model.abstract_params()
    optimizer = make_optimizer(experiment.optimizer, specs)
    layout = make_layout(specs, optimizer, mesh, experiment.mesh.zero)
    rows = process_rows(settings.batch_size, mesh)
    loader = Loader(corpus.train, batch_size=settings.batch_size, seed=settings.seed, rows=rows, **windows(experiment))
    evaluation_batches(corpus.validation, batch_size=1, **windows(experiment))  # checks the text
    return Parts(experiment, directory, corpus, loader, mesh, model, specs, optimizer, layout)


def windows(experiment: Experiment) -> dict[str, Any]:
    """How text is cut into windows for a model."""
    model = experiment.model
    most = getattr(model.moe, "max_documents", None)
    return {"length": model.context_length, "vocab_size": model.vocab_size, "max_documents": most}


def _check_prompt(experiment: Experiment, corpus: Corpus) -> None:
    settings, context = experiment.train, experiment.model.context_length
    length = len(corpus.tokenizer.encode(settings.sample_prompt)) + 1
    settings.require(length < context, "sample_prompt", f"has {length} tokens and model.context_length is {context}")


def begin(parts: Parts, experiment: Experiment) -> None:
    """Makes the run directory, or checks that it goes with the text; keeps `experiment` as it was asked for."""
    corpus, tokenizer = parts.corpus, parts.corpus.tokenizer
    tokens = len(corpus.train.tokens), len(corpus.validation.tokens)
    if jax.process_index() == 0:
        record = Record(experiment, parts.experiment.model.vocab_size, tokenizer.fingerprint, tokens)
        parts.directory.begin(record, tokenizer)
    barrier("run-directory")


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
