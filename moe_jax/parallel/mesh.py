"""The named device mesh. Only this module defines the names of the axes and their order."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from moe_jax import config
from moe_jax.errors import MeshError


class Axis(StrEnum):
    """The mesh axes, from the slowest links to the fastest: neighbours along the last axis are nearest."""

    DATA = "data"
    PIPELINE = "pipeline"
    CONTEXT = "context"
    EXPERT = "expert"
    TENSOR = "tensor"


ALL_AXES = tuple(Axis)  # in the order by which devices are numbered
Axes = Axis | tuple[Axis, ...]  # the axes of a collective: one, or several that act as one
_BETWEEN_SLICES = (Axis.DATA, Axis.PIPELINE)  # the axes that may span several slices of TPUs
BATCH_AXES = (Axis.DATA, Axis.EXPERT)  # sequences are sharded over both
# the tokens of a sequence are sharded over context and tensor ranks
TOKEN_AXES = (*BATCH_AXES, Axis.CONTEXT, Axis.TENSOR)


def mesh_sizes(settings: config.MeshConfig, num_devices: int) -> dict[Axis, int]:
    """Return the number of devices along each axis, with -1 resolved.

    Raises MeshError unless their product is `num_devices`.
    """
    sizes = {axis: settings.sizes[axis] for axis in Axis}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    text = " × ".join(
        f"{axis}={size}" for axis, size in sizes.items() if size > 1 or (axis in BATCH_AXES and size == 1)
    )
    if num_devices == 1 and fixed > 1:  # as on a laptop
        raise MeshError(
            f"mesh: {text} = {fixed}, but there is one device: use mesh.cpu_devices={fixed} to simulate as many on the "
            f"CPU, or {_cure(sizes, 1).removeprefix('use ')}"
        )
    free = [axis for axis, size in sizes.items() if size == -1]
    if free and num_devices % fixed:
        raise MeshError(
            f"mesh: {text} = {fixed} does not divide the {num_devices} devices, so mesh.{free[0]}=-1 has no value: "
            + _cure(sizes, num_devices)
        )
    if free:
        sizes[free[0]] = num_devices // fixed
    elif fixed != num_devices:
        raise MeshError(f"mesh: {text} = {fixed}, but there are {num_devices} devices: {_cure(sizes, num_devices)}")
    return sizes


def _cure(sizes: Mapping[Axis, int], num_devices: int) -> str:
    left = num_devices
    for axis in (Axis.TENSOR, Axis.CONTEXT, Axis.PIPELINE):
        size = math.gcd(max(sizes[axis], 1), left)  # a divisor of the requested size
        if size != sizes[axis]:
            rest = _cure({**sizes, axis: size}, num_devices).removeprefix("use ")
            return f"use mesh.{axis}={size} and {rest}"
        left //= size
    others = math.prod(size for axis, size in sizes.items() if axis not in BATCH_AXES and size != -1)
    expert = sizes[Axis.EXPERT]
    if expert > 0 and num_devices % (expert * others) == 0:
        return f"use mesh.data={num_devices // (expert * others)} or mesh.data=-1"
    valid = [size for size in range(1, num_devices // others + 1) if num_devices % (size * others) == 0]
    nearest = min(valid, key=lambda size: abs(size - expert), default=1)
    return f"use mesh.expert={nearest} with mesh.data=-1"


def found_devices() -> list[jax.Device]:
    """Return the devices of all processes.

    Raises MeshError if there is no device of the kind that JAX_PLATFORMS asks for.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: cuda without its plug-in
        message = str(error).strip().partition("\n")[0]
        is_one_of_many = jax.distributed.is_initialized()  # a launcher tries again, or continues without this process
        if is_one_of_many or (message and not message.startswith("Unable to initialize backend")):
            raise
        reason = message.partition(": ")[2].partition(" (set JAX_PLATFORMS")[0] or "it has no plug-in for them"
        asked: str = jax.config.jax_platforms  # type: ignore[attr-defined]
        raise MeshError(
            f"JAX_PLATFORMS={asked}: jax finds no such devices here ({reason}): "
            "install what they need, or set JAX_PLATFORMS=cpu, or leave it out"
        ) from None


def make_mesh(settings: config.MeshConfig, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Return the mesh over `devices` (default: all devices of all processes). Raises MeshError.

    Neighbours along the last axes are neighbours along the links of a slice of TPUs, and an axis fills whole sides of
    the slice if the sizes allow it. Several slices of TPUs lie along `data`, then `pipeline`.
    """
    devices = found_devices() if devices is None else devices
    sizes = mesh_sizes(settings, len(devices))
    slices = Counter(getattr(device, "slice_index", 0) for device in devices)
    try:
        if devices[0].platform == "tpu" and len(slices) > 1:
            outside = _slices_along_axes(sizes, list(slices.values()))
            inside = tuple(size // outside[axis] for axis, size in sizes.items())
            placed = mesh_utils.create_hybrid_device_mesh(
                inside, tuple(outside.values()), devices, allow_split_physical_axes=True
            )
        else:  # several slices of GPUs are nodes, in the order of the devices' numbers
            placed = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    except (NotImplementedError, AssertionError):  # shapes that do not fit the links of TPUs; devices that are no box
        text = " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        raise MeshError(
            f"mesh: {text} cannot be laid along the links of these {len(devices)} devices: "
            "use other sizes, or a slice of another shape"
        ) from None
    return jax.sharding.Mesh(placed, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def with_sizes_of(mesh: jax.sharding.Mesh, settings: config.Config) -> config.Config:
    """Return the config with the sizes of a mesh in place of -1. Raises ConfigError if other settings forbid them."""
    if settings.mesh.sizes == mesh.shape:
        return settings
    sizes = {str(axis): size for axis, size in mesh.shape.items()}
    return dataclasses.replace(settings, mesh=dataclasses.replace(settings.mesh, **sizes))


def one_device_mesh() -> jax.sharding.Mesh:
    """Return a mesh of this process's first device; all axes have size 1."""
    found_devices()
    return make_mesh(config.MeshConfig(), jax.local_devices()[:1])


def _slices_along_axes(sizes: Mapping[Axis, int], slice_sizes: Sequence[int]) -> dict[Axis, int]:
    """Return the number of slices of TPUs along each axis: as many as possible along `data`, the others along
    `pipeline`.

    All other axes stay inside a slice, since the network between slices is slow. `slice_sizes` are numbers of devices.
    Raises MeshError.
    """
    if len(set(slice_sizes)) > 1:
        raise MeshError(f"mesh: the slices have {', '.join(map(str, slice_sizes))} devices: use slices of equal size")
    along, left = dict.fromkeys(sizes, 1), len(slice_sizes)
    for axis in _BETWEEN_SLICES:
        along[axis] = math.gcd(left, sizes[axis])
        left //= along[axis]
    if left > 1:
        text = " × ".join(f"{axis}={sizes[axis]}" for axis in _BETWEEN_SLICES)
        inner = len(slice_sizes) * slice_sizes[0] // math.prod(sizes[axis] for axis in _BETWEEN_SLICES)
        raise MeshError(
            f"mesh: {text} does not divide into {len(slice_sizes)} slices, and other axes stay inside a slice of "
            f"{slice_sizes[0]} devices, but take {inner}: make data × pipeline a multiple of {len(slice_sizes)}"
        )
    return along


def expert_axis(settings: config.MeshConfig) -> Axes:
    """Return the axis or axes over which experts are sharded."""
    axes = tuple(map(Axis, settings.expert_axes))
    return axes if len(axes) > 1 else axes[0]


def batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Return the number of devices that have different sequences."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
