"""Whether exchanges of rows stay inside nodes of GPUs, as far as devices report their nodes."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from moe_jax.config.yaml_io import load_config
from moe_jax.models import transformer
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.mesh import Axis


@dataclass(frozen=True)
class Device:
    """Stands for a device of a mesh: no test machine has several nodes."""

    platform: str
    id: int
    process_index: int


@pytest.mark.parametrize(
    ("platform", "of_node", "expert", "inside"),
    [
        ("cuda", 4, 4, True),
        ("cuda", 4, 2, True),
        ("cuda", 4, 8, False),  # a group is in two nodes
        ("cuda", 8, 4, False),  # there is one node
        ("cuda", 4, 1, False),  # there is no exchange
        ("cpu", 4, 4, False),
    ],
)
def test_gpus_in_several_nodes(platform, of_node, expert, inside, monkeypatch):
    monkeypatch.setattr(transformer, "capability_of", lambda device: (9, 0))
    settings = [f"mesh.data={8 // expert}", f"mesh.expert={expert}", "model.moe.num_experts=8"]
    config = load_config(None, settings)
    devices = np.empty(8, object)
    for i in range(8):
        devices[i] = Device(platform, i, i // of_node)
    sizes = {axis: config.mesh.sizes[axis] for axis in Axis}
    mesh = jax.sharding.Mesh(devices.reshape(list(sizes.values())), tuple(sizes))
    assert ComputeConfig.of(config, mesh).exchanges_inside_nodes == inside
