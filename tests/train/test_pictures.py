import json

import numpy as np
import pytest

from zoo.rundir import RunError
from zoo.train.pictures import draw_pictures, experts_figure, loss_figure, routing_history


def rows(n_experts=4, n_layers=2, steps=(1, 10, 20, 30)):
    rng = np.random.default_rng(0)
    out = []
    for step in steps:
        load = rng.dirichlet(np.ones(n_experts), n_layers).tolist()
        out.append({"step": step, "train/bits_per_byte": 8.0 / step, "moe/load": load})
        if step % 20 == 0:
            out.append({"step": step, "val/bits_per_byte": 2.0, "val/gzip_bits_per_byte": 1.9})
    return out


def test_the_loss_picture_has_both_series_and_gzip():
    axes = loss_figure(rows()).axes[0]
    train, validation, gzip = axes.lines
    np.testing.assert_array_equal(train.get_xydata(), [(1, 8), (10, 0.8), (20, 0.4), (30, 8 / 30)])
    np.testing.assert_array_equal(validation.get_xydata(), [(20, 2.0)])
    assert list(gzip.get_ydata()) == [1.9, 1.9]
    assert [text.get_text() for text in axes.get_legend().texts] == [
        "training batch",
        "validation set",
        "gzip -9: 1.90",
    ]
    assert [text.get_text() for text in axes.texts] == ["2.000"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "bits per byte")


def test_values_that_were_not_finite_leave_a_gap():
    axes = loss_figure([*rows(), {"step": 40, "train/bits_per_byte": None}]).axes[0]
    assert axes.lines[0].get_xdata().max() == 30


def test_a_run_without_validation_has_a_picture_too():
    assert loss_figure([{"step": 1, "train/bits_per_byte": 3.0}]).axes[0].lines
    assert loss_figure([]).axes


@pytest.mark.parametrize("n_layers", [1, 2, 11])
def test_the_experts_picture_has_a_map_for_each_layer(n_layers):
    history = rows(n_layers=n_layers)
    figure = experts_figure(history)
    steps, load = routing_history(history)
    assert list(steps) == [1, 10, 20, 30]
    np.testing.assert_allclose(load.mean(-1), 1)
    maps = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.collections and axes.get_title(loc="left")}
    assert sorted(maps) == sorted(f"layer {i}" for i in range(n_layers))
    for i in range(n_layers):
        mesh = maps[f"layer {i}"].collections[0]
        np.testing.assert_allclose(np.asarray(mesh.get_array()).reshape(4, 4), load[:, i].T)
        np.testing.assert_array_equal(mesh.get_coordinates()[0, :, 0], [0.5, 5.5, 15, 25, 30.5])


def test_files_are_drawn_from_the_metrics_alone(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join(json.dumps(row) for row in rows()))
    draw_pictures(metrics, tmp_path / "loss.png", tmp_path / "experts.png")
    for name in ("loss.png", "experts.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_full_disk_leaves_the_picture_that_was_there(tmp_path):
    metrics, loss = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    metrics.write_text('{"step": 1, "train/bits_per_byte": 3.0}\n')
    loss.write_bytes(b"old")
    (tmp_path / "loss.png.new").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"loss.png cannot be written \(No space left on device\)"):
        draw_pictures(metrics, loss, tmp_path / "experts.png")
    assert loss.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2


def test_a_model_without_a_mixture_has_no_picture_of_experts(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "train/bits_per_byte": 3.0}\n')
    draw_pictures(metrics, tmp_path / "loss.png", tmp_path / "experts.png")
    assert not (tmp_path / "experts.png").exists()
