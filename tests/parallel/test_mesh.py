"""The mesh has the asked-for sizes, or says in one sentence why it cannot."""

import jax
import pytest
from jax.sharding import AxisType

from zoo.config import ConfigError, MeshConfig
from zoo.parallel.mesh import make_mesh


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (MeshConfig(), (8, 1, 1, 1, 1)),
        (MeshConfig(data=2, fsdp=-1, tensor=2), (2, 2, 2, 1, 1)),
        (MeshConfig(data=1, fsdp=2, tensor=2, expert=2), (1, 2, 2, 2, 1)),
        (MeshConfig(data=1, fsdp=2, context=4), (1, 2, 1, 1, 4)),
    ],
)
def test_sizes(config, sizes):
    mesh = make_mesh(config)
    assert tuple(mesh.shape.items()) == tuple(zip(("data", "fsdp", "tensor", "expert", "context"), sizes, strict=True))
    assert mesh.axis_types == (AxisType.Auto,) * 5


def test_some_devices():
    assert make_mesh(MeshConfig(), jax.devices()[:3]).shape["data"] == 3


@pytest.mark.parametrize(
    ("config", "wanted"),
    [(MeshConfig(data=3), "3 devices"), (MeshConfig(tensor=3), "a multiple of 3"), (MeshConfig(data=16), "16 devices")],
)
def test_a_mesh_that_does_not_fit(config, wanted):
    with pytest.raises(ConfigError, match=rf"mesh.data=.* mesh.context=1 needs {wanted}.* there are 8.* product 8"):
        make_mesh(config)
