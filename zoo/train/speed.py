"""How fast a run is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from zoo.describe import flops_per_token, peak_flops
from zoo.train.metrics import Row
from zoo.train.parts import Parts


class Speed:
    """Tokens and operations per second between two looks, without the time of pauses or of compiling."""

    def __init__(self, parts: Parts):
        model, settings = parts.experiment.model, parts.experiment.train
        self._tokens = settings.batch_size * model.context_length
        self._flops = flops_per_token(model, parts.specs, model.context_length)
        peak = peak_flops(parts.mesh.devices.flat[0].device_kind)
        self._peak = peak and peak * parts.mesh.size
        self._paused = 0.0
        self._last: tuple[int, float] | None = None
        self._step_time: float | None = None

    def step_done(self, step: int) -> None:
        """The first step, which was compiled, starts the clock."""
        if self._last is None:
            self._last = step, time.perf_counter() - self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens inside does not count."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start

    def lap(self, step: int) -> Row:
        """Speed since the last lap; nothing where no time is known."""
        before, then = self._last or (step, 0.0)
        now = time.perf_counter() - self._paused
        if step == before:
            return {}
        self._last, self._step_time = (step, now), (now - then) / (step - before)
        per_second = self._tokens / self._step_time
        row = {"tokens_per_second": per_second, "flops_per_second": per_second * self._flops}
        return row | ({"mfu": row["flops_per_second"] / self._peak} if self._peak else {})

    def seconds(self, steps: int) -> float | None:
        """How long so many steps take, at the speed of the last lap."""
        return None if self._step_time is None else steps * self._step_time
