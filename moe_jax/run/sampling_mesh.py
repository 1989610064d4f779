"""The devices of this process that generate text: the expert and tensor ranks of a run.

Parameters are sharded as in training, so no device holds them all. Each data and expert rank generates its own texts.
The other axes of training are not needed: their ranks would hold the same parameters (context) or wait for each other
(pipeline stages).
"""

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from moe_jax.checkpoint.load import load_step
from moe_jax.config import Config, DataConfig, ExchangeConfig, MeshConfig, ModelConfig, TrainConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.config.ranges import SIMULATED, check_number
from moe_jax.config.validate.mesh import widths_over_tensor
from moe_jax.errors import ConfigError, MeshError, as_yaml, divisors_text
from moe_jax.models.decode import unstacked
from moe_jax.models.parameters import in_order, param_dims, stored_shapes
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.mesh import Axis, expert_axis, found_devices, make_mesh, mesh_sizes
from moe_jax.parallel.sharding import partitions, shardings
from moe_jax.parallel.trees import Params, Tree

_AXES = (Axis.DATA, Axis.EXPERT, Axis.TENSOR)
_USED = {*_AXES, "cpu_devices"}  # settings of the mesh


def asked_mesh(mesh: MeshConfig, given: Collection[str]) -> MeshConfig | None:
    """Return the mesh that a command line asks for, or None if it names no setting of the mesh.

    `mesh` are the run's settings, changed by those that are `given`. Raises ConfigError for an axis that is not used.
    """
    if not given:
        return None
    for name in sorted(set(given) - _USED):
        value, alone = getattr(mesh, name), getattr(MeshConfig(), name)
        if value != alone:
            raise ConfigError(
                f"mesh.{name}={as_yaml(value)}: text is generated over data, expert and tensor ranks: leave "
                f"mesh.{name} out"
            )
    if mesh.cpu_devices is not None:  # used before a config is made
        check_number("mesh.cpu_devices", mesh.cpu_devices, SIMULATED)
    data = mesh.data if Axis.DATA in given else 1
    return MeshConfig(data=data, expert=mesh.expert, tensor=mesh.tensor, cpu_devices=mesh.cpu_devices)


@dataclasses.dataclass(frozen=True)
class SamplingMesh:
    """Where and how the model of a run is computed to generate text."""

    config: Config  # of the same model, on these devices
    mesh: Mesh
    stages: Stages  # of the run, in whose layout its parameters are stored
    missing: str = ""  # why the run's own ranks are not used; empty: they are, or were only simulated

    @classmethod
    def of(cls, config: Config, asked: MeshConfig | None = None) -> "SamplingMesh":
        """Return the devices that were asked for.

        If none were, these are as many as the expert and tensor ranks of the run; or a single one if there are fewer,
        or if the run simulated them. Raises ConfigError and MeshError.
        """
        found_devices()
        devices, alone, missing = jax.local_devices(), MeshConfig(data=1), ""
        if asked is not None:
            there = _on_devices(config, asked, len(devices))
        elif config.mesh.cpu_devices:
            there = _on_devices(config, alone, len(devices))
        else:
            own = MeshConfig(data=1, expert=config.mesh.expert, tensor=config.mesh.tensor)
            try:
                there = _on_devices(config, own, len(devices))
            except (ConfigError, MeshError) as error:
                there, missing = _on_devices(config, alone, len(devices)), str(error)
        devices = devices[: math.prod(there.mesh.sizes.values())]
        return cls(there, make_mesh(there.mesh, devices), Stages.of(config), missing)

    @property
    def compute(self) -> ComputeConfig:
        """The computation on these devices."""
        return ComputeConfig.of(self.config, self.mesh)

    @property
    def specs(self) -> Tree:
        """The partition of each parameter of the decoder's blocks, one by one."""
        of_blocks = unstacked(param_dims(self.config.model), self.config.model, lambda dims, count: count * [dims[1:]])
        return partitions(of_blocks, expert_axis(self.config.mesh))

    @property
    def _stacked(self) -> Tree:
        """The sharding of each parameter of stacked blocks."""
        return shardings(self.mesh, partitions(param_dims(self.config.model), expert_axis(self.config.mesh)))

    @property
    def batch_ranks(self) -> int:
        """The number of ranks that generate different texts."""
        return self.config.mesh.data * self.config.mesh.expert

    def load(self, run: Path, average: bool, step: int | None = None) -> tuple[int, Params]:
        """Return the step and the parameters of a run's checkpoint (the newest one), or their moving average.

        They are as text generation reads them. Raises UserError.
        """
        shapes = jax.tree.map(
            lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own),
            stored_shapes(self.stages),
            self._stacked,
        )
        found, params = load_step(run, shapes, average, step)
        return found, self._unstacked(params, frees=True)

    def placed(self, params: Any) -> Params:
        """Return parameters as text generation reads them, from any mesh of this process and in the run's layout."""
        return self._unstacked(jax.device_put(params, self._stacked), frees=False)

    def _unstacked(self, params: Params, frees: bool) -> Params:
        """Return the parameters of blocks one by one. `frees`: their stacks are deleted, one after another."""

        def take(leaf: jax.Array, count: int) -> list[jax.Array]:
            parts = list(leaf[:count])
            if frees:
                leaf.delete()
            return parts

        split = unstacked(in_order(params, self.stages), self.config.model, take)
        return jax.device_put(split, shardings(self.mesh, self.specs))

    def put(self, tree: Any, spec: Any) -> Any:
        """Return host arrays on these devices, with this partition."""
        return jax.device_put(tree, NamedSharding(self.mesh, spec))


def _on_devices(config: Config, mesh: MeshConfig, num_devices: int) -> Config:
    """Return settings that generate text with the model of a config on a mesh. Raises ConfigError and MeshError."""
    sizes = _sizes(mesh, num_devices)
    there = MeshConfig(data=sizes[Axis.DATA], expert=sizes[Axis.EXPERT], tensor=sizes[Axis.TENSOR])
    _check_split(config.model, there)
    # kernels of the run may not exist for these devices, its exchange may need several, and no token is dropped
    return Config(
        model=config.model,
        mesh=there,
        data=DataConfig(seq_len=config.data.seq_len),
        train=TrainConfig(compute_dtype=config.train.compute_dtype, seed=config.train.seed),
        exchange=ExchangeConfig(algorithm="flat", rank_capacity_factor=None),
    )


def _check_split(model: ModelConfig, mesh: MeshConfig) -> None:
    """Raise ConfigError for ranks that a trained model does not divide over: another mesh is the only cure."""
    divided = {Axis.TENSOR: widths_over_tensor(model, mesh)}
    if model.moe.num_experts:
        divided[Axis.EXPERT] = {"model.moe.num_experts": model.moe.num_experts}
    for axis, sizes in divided.items():
        ranks = mesh.sizes[axis]
        for name, size in sizes.items():
            if ranks > 1 and size % ranks:
                raise ConfigError(
                    f"mesh.{axis}={ranks} does not divide {name}={size}: use mesh.{axis}="
                    f"{divisors_text(math.gcd(*sizes.values()))}"
                )


def _sizes(mesh: MeshConfig, num_devices: int) -> dict[Axis, int]:
    """Return the size of each axis, with -1 resolved. Raises MeshError if there are not as many devices."""
    wanted = {axis: mesh.sizes[axis] for axis in _AXES}
    if -1 in wanted.values():
        return mesh_sizes(mesh, num_devices)
    needed = math.prod(wanted.values())
    if needed > num_devices:
        text = " × ".join(f"mesh.{axis}={size}" for axis, size in wanted.items() if size > 1)
        simulated = f"simulate them with mesh.cpu_devices={needed}" if jax.default_backend() == "cpu" else ""
        cure = simulated or "use more devices"
        raise MeshError(
            f"{text} takes {needed} devices, and this process has {num_devices}: {cure}, or use "
            f"{' '.join(f'mesh.{axis}=1' for axis, size in wanted.items() if size > 1)}"
        )
    return wanted
