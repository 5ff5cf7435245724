"""An experiment: a model with data, optimizer, training and mesh."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from zoo.config.model import ModelConfig
from zoo.config.section import Needs, Section
from zoo.config.serialize import flat, to_dict


@dataclass(frozen=True)
class Source(Section):
    """One of several sources of text.

    Attributes:
        path: as DataConfig.path.
        weight: its share of the training windows, relative to the other sources'; validation does without.
        text_field: as DataConfig.text_field.
    """

    path: str
    weight: float = 1.0
    text_field: str = "text"

    section: ClassVar[str] = "data.sources"

    def __post_init__(self):
        super().__post_init__()
        self.require(self.weight > 0, "weight", "must be positive")


@dataclass(frozen=True)
class DataConfig(Section):
    """Where the text comes from and how it becomes tokens.

    Attributes:
        path: a file or a glob of text (.txt, or any other ending), JSON lines (.jsonl, .json) or Parquet
            (.parquet), the first two also with .gz or .zst; or hf://NAME[/CONFIG][:SPLIT] for Hugging Face
            datasets; None reads the Python standard library's own source text.
        text_field: the field of a JSON line, or the column, that holds the text; each of `sources` has its own.
        sources: several sources instead of `path`, drawn from by weight in training.
        documents: in training: "packed" one after another into windows, or "truncated" to one window each.
        validation_fraction: share of the data kept for validation, which is always packed and counts every token of
            every source once, whatever `documents` and the weights of `sources` make of training.
        split: "document" sends whole documents to validation by a hash of their name, the same ones every
            time; "tail" takes the last part of every document; "auto" is "tail" for a single document.
        tokenizer: "sentencepiece" (byte-pair encoding), "bytes" or "characters".
        tokenizer_model: a SentencePiece .model file to use; None trains one on the training text.
        vocab_size: pieces of a SentencePiece model trained here; a `tokenizer_model` has its own.
        add_bos: begin each document with the BOS token.
        add_eos: end each document with the EOS token.
        cache_dir: where tokenized text is kept; None means $ZOO_CACHE, or ~/.cache/zoo.
    """

    path: str | None = None
    text_field: str = "text"
    sources: tuple[Source, ...] = ()
    documents: Literal["packed", "truncated"] = "packed"
    validation_fraction: float = 0.05
    split: Literal["auto", "document", "tail"] = "auto"
    tokenizer: Literal["sentencepiece", "bytes", "characters"] = "sentencepiece"
    tokenizer_model: str | None = None
    vocab_size: int = 2048
    add_bos: bool = True
    add_eos: bool = True
    cache_dir: str | None = None

    section: ClassVar[str] = "data"
    needs: ClassVar[Needs] = {
        "text_field": ("sources", ((),)),
        "vocab_size": ("tokenizer", ("sentencepiece",)),
        "tokenizer_model": ("tokenizer", ("sentencepiece",)),
    }
    # Where things lie does not change what is learned.
    speed_fields: ClassVar[tuple[str, ...]] = ("cache_dir",)

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(8, "vocab_size")
        self.require(0 < self.validation_fraction < 1, "validation_fraction", "must lie between 0 and 1, both excluded")
        self.require(not self.sources or self.path is None, "path", "stands beside data.sources; give one of them")
        paths = [source.path for source in self.sources]
        self.require(
            len(set(paths)) == len(paths), "sources", "holds the same path twice; give it the sum of the weights"
        )


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """The update rule and its learning rate.

    Attributes:
        name: "adamw", "lion" (arXiv 2302.06675), "adafactor" (arXiv 1804.04235), or "muon" for matrices with AdamW
            for everything else.
        learning_rate: peak rate of AdamW, Lion or Adafactor.
        muon_learning_rate: peak rate of Muon.
        beta1: of AdamW (arXiv 1711.05101): how much of the mean gradient a step keeps; of Lion, what the momentum
            weighs in a direction.
        beta2: of AdamW: how much of the mean squared gradient a step keeps; of Lion, of the momentum (published: 0.99).
        eps: of AdamW: added to the root of the mean squared gradient.
        muon_momentum: of Muon: how much of the momentum a step keeps.
        weight_decay: decoupled, on matrices only.
        clip_norm: the gradient is scaled down to this global norm; None leaves it.
        schedule: after warm-up: "cosine", "linear", "constant", or "wsd": stable, then a linear decay.
        warmup_steps: W; step t < W uses the rate times (t + 1) / W.
        min_ratio: the lowest rate as a share of the peak; "constant" has none.
        decay_fraction: the last share of the steps, over which "wsd" decays.
        final_decay_steps: the last steps, over which any schedule falls linearly to zero.
        ema_decay: share that the running mean of the parameters keeps at a step; evaluation, samples and generation
            use that mean. None keeps none.
    """

    name: Literal["adamw", "muon", "lion", "adafactor"] = "adamw"
    learning_rate: float = 1e-3
    muon_learning_rate: float = 0.02
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    muon_momentum: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: int = 100
    min_ratio: float = 0.1
    decay_fraction: float = 0.2
    final_decay_steps: int = 0
    ema_decay: float | None = None

    section: ClassVar[str] = "optimizer"
    needs: ClassVar[Needs] = {
        "muon_learning_rate": ("name", ("muon",)),
        "muon_momentum": ("name", ("muon",)),
        "beta1": ("name", ("adamw", "lion", "muon")),
        "beta2": ("name", ("adamw", "lion", "muon")),
        "eps": ("name", ("adamw", "muon")),
        "min_ratio": ("schedule", ("cosine", "linear", "wsd")),
        "decay_fraction": ("schedule", ("wsd",)),
    }

    def __post_init__(self):
        super().__post_init__()
        self.require(self.learning_rate > 0, "learning_rate", "must be positive")
        self.require(self.muon_learning_rate > 0, "muon_learning_rate", "must be positive")
        self.require(self.eps > 0, "eps", "must be positive")
        self.require(self.clip_norm is None or self.clip_norm > 0, "clip_norm", "must be positive, or None")
        self.require_between(0, 0.99999, "beta1", "beta2", "muon_momentum")
        self.require_between(0, 1, "min_ratio", "decay_fraction")
        ema = self.ema_decay
        self.require(ema is None or 0 < ema < 1, "ema_decay", "must lie between 0 and 1, both excluded, or be None")
        self.require_at_least(0, "warmup_steps", "weight_decay", "final_decay_steps")


@dataclass(frozen=True)
class TrainConfig(Section):
    """How long, how often, and where to.

    Attributes:
        dir: the run directory; None means runs/NAME.
        steps: optimizer updates.
        batch_size: B, sequences per update, over all devices and micro-batches.
        micro_batches: parts that a batch is computed in; the gradient is that of the whole batch.
        seed: of the initial parameters, the order of the data and the dropout masks; less than 2^32.
        max_bad_steps: updates with a non-finite gradient in a row, each skipped, after which the run stops.
        log_every: steps between two lines of metrics.
        eval_every: steps between evaluations; None for only at the end.
        save_every: steps between checkpoints; None for only at the end.
        sample_every: steps between sampled texts; None for none.
        eval_batch_size: sequences per evaluation batch; it changes speed, not the result.
        keep_last: newest checkpoints that are kept.
        keep_every: checkpoints at multiples of this many steps are kept for good.
        sample_prompt: the text that samples go on from.
        sample_tokens: the length of a sample.
        tensorboard: write events for TensorBoard.
        wandb: the Weights & Biases project to send metrics to; None sends none. Needs the package wandb.
    """

    dir: str | None = None
    steps: int = 1000
    batch_size: int = 16
    micro_batches: int = 1
    seed: int = 0
    max_bad_steps: int = 10
    log_every: int = 10
    eval_every: int | None = 250
    save_every: int | None = 250
    sample_every: int | None = None
    eval_batch_size: int = 16
    keep_last: int = 2
    keep_every: int | None = None
    sample_prompt: str = ""
    sample_tokens: int = 200
    tensorboard: bool = True
    wandb: str | None = None

    section: ClassVar[str] = "train"

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "steps", "batch_size", "micro_batches", "max_bad_steps", "log_every", "eval_every")
        self.require_at_least(1, "save_every", "sample_every", "eval_batch_size", "keep_last", "keep_every")
        self.require_at_least(1, "sample_tokens")
        self.require(0 <= self.seed < 2**32, "seed", "must be at least 0 and less than 2^32")
        self.require(
            self.batch_size % self.micro_batches == 0,
            "batch_size",
            f"is not a multiple of {self.named('micro_batches')}",
        )


@dataclass(frozen=True)
class MeshConfig(Section):
    """Devices along each mesh axis; one axis may be -1 and takes what is left.

    Attributes:
        data: copies of the model, each with its part of the batch.
        fsdp: parts that the batch and, by `zero`, the training state are split into.
        tensor: parts of every head group, hidden layer and vocabulary.
        expert: parts of the experts, and of the batch: tokens meet their experts by an exchange between these parts.
        context: parts of every sequence; in attention, keys and values go round them (arXiv 2310.01889).
        zero: what is split over fsdp (arXiv 1910.02054): 1 optimizer state, 2 gradients too, 3 parameters too.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    zero: Literal[1, 2, 3] = 3

    section: ClassVar[str] = "mesh"
    axes: ClassVar[tuple[str, ...]] = ("data", "fsdp", "tensor", "expert", "context")

    def __post_init__(self):
        super().__post_init__()
        for name in self.axes:
            self.require(getattr(self, name) == -1 or getattr(self, name) >= 1, name, "must be positive, or -1")
        open_axes = [name for name in self.axes if getattr(self, name) == -1]
        self.require(
            len(open_axes) <= 1,
            "data",
            f"and others are -1 ({', '.join(open_axes)}); at most one may be, so give the others a number",
        )


@dataclass(frozen=True)
class Experiment(Section):
    """A model, the data it learns from, and how it is trained.

    Attributes:
        name: of the run; its directory is runs/NAME unless train.dir says otherwise.
    """

    name: str
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    section: ClassVar[str] = "experiment"

    def __post_init__(self):
        super().__post_init__()
        plain = self.name not in ("", ".", "..") and "/" not in self.name
        self.require(plain, "name", "must be a plain, non-empty name")
        steps, schedule = self.train.steps, self.optimizer
        schedule.require(
            schedule.warmup_steps + schedule.final_decay_steps <= steps,
            "warmup_steps",
            f"and {schedule.named('final_decay_steps')} leave nothing of {self.train.named('steps')}",
        )

    @property
    def directory(self) -> str:
        """The run directory."""
        return self.train.dir or f"runs/{self.name}"

    def identity(self) -> dict[str, Any]:
        """What decides the trained parameters, save the number of steps: model, data, optimizer, batch size and
        seed, by the names of the fields. Logging, mesh, remat and where caches lie may change between two starts of
        a run."""
        fields = {f"train.{name}": getattr(self.train, name) for name in ("batch_size", "seed")}
        for part in ("model", "data", "optimizer"):
            section = getattr(self, part)
            free = {f"{part}.{name}" for name in getattr(section, "speed_fields", ())}
            fields |= {name: value for name, value in flat(to_dict(section), part).items() if name not in free}
        return fields
