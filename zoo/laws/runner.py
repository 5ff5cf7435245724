"""Runs the laws on a model and says what they found."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from zoo.config import ConfigError, nearest
from zoo.laws import outputs, training
from zoo.laws.case import Case, Finding, make_case
from zoo.models.decoder import Decoder

LAWS: dict[str, Callable[[Case], Finding]] = {
    "causality": outputs.causality,
    "padding": outputs.padding,
    "packing": outputs.packing,
    "batch": outputs.batch,
    "cache": outputs.cache,
    "accumulation": training.accumulation,
    "sharding": training.sharding,
    "compilation": training.compilation,
    "equivalence": training.equivalence,
}


class Report(dict[str, Finding]):
    """Law -> Finding; prints as a table."""

    @property
    def passed(self) -> bool:
        """Whether no law that was tried failed."""
        return all(finding.passed is not False for finding in self.values())

    def __str__(self) -> str:
        words = {True: "pass", False: "FAIL", None: "-"}
        return "\n".join(f"{law:<13} {words[f.passed]:<5} {f.detail}" for law, f in self.items())


def check(
    model: Decoder,
    params: Any = None,
    *,
    laws: Sequence[str] | str = tuple(LAWS),
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Report:
    """Runs the laws of a causal decoder on `model` and says, law by law, whether it keeps them.

    Computes in float32. Resuming bit for bit is a law of training runs, not of models, and is not tried here.

    Args:
        model: anything with the interface of `zoo.build`'s model; large ones take long, so check a small config.
        params: its parameters; None makes random ones in which no leaf is zero.
        laws: names from `LAWS`, or one of them.
        seed: of parameters and tokens.
        say: gets a line per law as it is done: its name, pass or FAIL, and the counterexample.

    Raises:
        ConfigError: a law of an unknown name, or no law at all.
    """
    laws = [laws] if isinstance(laws, str) else laws
    if not laws:
        raise ConfigError(f"laws={laws!r} holds no law to try; name some of {', '.join(LAWS)}, or leave it out")
    for law in laws:
        if law not in LAWS:
            raise ConfigError(f"law {law!r} is not one of {', '.join(LAWS)}{nearest(law, LAWS)}")
    case = make_case(model, params, seed)
    report = Report()
    for law in laws:
        report[law] = LAWS[law](case)
        say(str(Report({law: report[law]})))
    if not report.passed:
        failed = [law for law, finding in report.items() if finding.passed is False]
        say("\n".join(f"{law}: {inspect.getdoc(LAWS[law])}" for law in failed))
    return report
