"""The pictures of a run, drawn from metrics.jsonl alone, so that they can be drawn again at any time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from zoo.rundir import replacing
from zoo.train.metrics import Row, read_rows

TRAIN, VALIDATION, GZIP, INK = "#9db7d5", "#c8472b", "#5b5b5b", "#222222"
DPI = 200


def draw_pictures(metrics: Path, loss: Path, experts: Path) -> None:
    """Draws both pictures from a metrics file; a model without a mixture has no picture of experts.

    Raises:
        RunError: they cannot be written; older ones stay.
    """
    rows = read_rows(metrics)
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        _save(loss_figure(rows), loss)
        if any("moe/load" in row for row in rows):
            _save(experts_figure(rows), experts)


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as draft:
        figure.savefig(draft, dpi=DPI, format="png")


def _series(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have a finite value of that name."""
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return np.array([step for step, _ in pairs]), np.array([value for _, value in pairs], float)


def loss_figure(rows: Sequence[Row]) -> Figure:
    """Training and validation loss in bits per byte over steps, and what gzip -9 needs for the validation text."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    steps, train = _series(rows, "train/bits_per_byte")
    axes.plot(steps, train, color=TRAIN, lw=1, label="training batch")
    steps, validation = _series(rows, "val/bits_per_byte")
    axes.plot(steps, validation, color=VALIDATION, lw=1.8, marker="o", ms=3.5, label="validation set")
    _, gzip = _series(rows, "val/gzip_bits_per_byte")
    if gzip.size:
        axes.axhline(gzip[-1], color=GZIP, ls="--", lw=1, label=f"gzip -9: {gzip[-1]:.2f}")
    if validation.size:
        _annotate(axes, float(steps[-1]), float(validation[-1]))
    _limits(axes, train, validation, gzip)
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.grid(axis="y", color="#e6e6e6", lw=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right")
    return figure


def _annotate(axes: Axes, step: float, value: float) -> None:
    axes.annotate(
        f"{value:.3f}",
        (step, value),
        xytext=(0, -14),
        textcoords="offset points",
        ha="right",
        color=VALIDATION,
        weight="bold",
    )


def _limits(axes: Axes, *series: np.ndarray) -> None:
    """From a little below the lowest value to a little above the highest of all but the first few values."""
    values = np.concatenate(series)
    if values.size:
        top = max([np.quantile(s, 0.98) for s in series if s.size])
        low = values.min()
        axes.set_ylim(low - 0.12 * (top - low) - 0.02, top + 0.05 * (top - low) + 0.02)


def experts_figure(rows: Sequence[Row]) -> Figure:
    """Load of every expert over the steps, one map a layer: its share of the layer's assignments times E."""
    steps, load = routing_history(rows)
    n_layers, n_experts = load.shape[1:]
    columns = -(-n_layers // 8)
    lines = -(-n_layers // columns)
    size = (1.2 + 5.4 * columns**0.7, max(2.4, 1.1 + lines * max(0.75, min(1.6, 0.16 * n_experts))))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    norm = TwoSlopeNorm(1, 0, max(2.0, float(np.quantile(load, 0.995))))
    for layer, axes in enumerate(grid.T.flat):
        if layer < n_layers:
            image = _heat(axes, steps, load[:, layer], norm, f"layer {layer}")
        else:
            axes.set_axis_off()
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("expert", fontsize=9)
    bar = figure.colorbar(image, ax=grid, extend="max", aspect=30, pad=0.01)
    bar.set_label("load / mean load of the layer")
    return figure


def routing_history(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Steps [N], and load [N, L, E] as a multiple of the mean over experts."""
    kept = [row for row in rows if "moe/load" in row]
    load = np.array([row["moe/load"] for row in kept], float)
    return np.array([row["step"] for row in kept]), load * load.shape[-1]


def _heat(axes: Axes, steps: np.ndarray, load: np.ndarray, norm: Any, name: str) -> Any:
    """One layer: [N, E] as a map with time to the right; each column reaches from its step half-way to the next."""
    middles = (steps[1:] + steps[:-1]) / 2
    edges = np.concatenate([[steps[0] - 0.5], middles, [steps[-1] + 0.5]])
    image = axes.pcolormesh(
        edges, np.arange(load.shape[1] + 1) - 0.5, load.T, norm=norm, cmap="RdBu_r", rasterized=True
    )
    axes.set_title(name, fontsize=8, loc="left", pad=2)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.spines[:].set_visible(False)
    return image
