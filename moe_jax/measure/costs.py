"""Estimate how long an instruction of a compiled program takes on a target, from the program's text.

Compute: the cycles that the TPU compiler estimates, divided by the clock rate. Without an estimate (on GPUs; for
gathers, scatters and sorts on TPUs): the longer of matrix operations at peak rate and memory traffic at memory
bandwidth. Collectives: on each kind of link, inside a node and between nodes, a start-up time plus the bytes that leave
a device over it (`plan.collective_costs`); both kinds work in parallel. Prefetches between memories are free.
"""

import itertools
import math
import re
from typing import Literal

import numpy as np

from moe_jax.measure.hlo import HloError, HloModule, Instruction, arrays, num_bytes
from moe_jax.measure.targets import Target
from moe_jax.plan.collective_costs import shares
from moe_jax.plan.task_times import Linear

Link = Literal["inside", "between"]  # inside a node, between nodes
FusedPart = Literal["start", "step", "done"]
COLLECTIVES = (
    "all-to-all",
    "ragged-all-to-all",
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "collective-permute",
    "collective-broadcast",
)
_FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "add-dependency", "domain", "infeed", "outfeed"),
}
_PARTIAL_READS = ("dynamic-slice", "slice", "gather")
_ALLOCATION = 'custom_call_target="AllocateBuffer"'
_GEMM = re.compile(r'custom_call_target="(__cublas\$|.*gemm|.*matmul)')
_FLASH = re.compile(r'custom_call_target="__cudnn\$fmha')
_SPLASH = re.compile(r"\bsplash_m[hq]a_(fwd|dq|dkv)")  # kernels of models/attention/kernels.py
_UNINITIALIZED = "/uninitialized/"  # the kernel of parallel/uninitialized.py
# products of rows in groups: XLA:TPU's kernel, and scopes of models/grouped_products.py
_GROUPED = re.compile(r"(?:^|/)(?:ragged-dot(?:-none)?|ragged_dot_general)$|\bgrouped_(?:rows|weights)\b")
# replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}: axes of a mesh, its devices unless they are
# in ascending order, as a list or as an array with its axes in another order, and the axes of a group
_OVER_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]+)\](?:, device_ids=\((?:([\d,]+)|\[([\d,]+)\](?:T\(([\d,]+)\))?)\))? \{([^}]+)\}"
)
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_GROUP_AXIS = re.compile(r"'?([^',:{}]+)'?(?::\((\d+)\)(\d+))?")
_EXACT = re.compile(r"operand_precision[\"=:]*[{\[]\"?highest", re.I)  # of a product or of cuBLAS
_FLOAT32_BITS, _FP8_BITS = 32, 8
_MATRIX_DIMS = 2
_NO_CYCLES = 2**62  # and above: the compiler has no estimate, and writes the largest number of 64 bits


def collective_of(instruction: Instruction, program: HloModule) -> Instruction | None:
    """Return the collective that an instruction is, starts, or contains; None if there is none."""
    for line in program.inside(instruction):
        if line.opcode.removesuffix("-start") in COLLECTIVES:
            return line
    return None


def fused_part(line: Instruction, program: HloModule) -> FusedPart | None:
    """Return which part of a collective a fusion runs, or None.

    XLA:TPU can split a collective of the TensorCore into a start, steps, and a done. A step is part of a fusion that
    computes something else. Each of these fusions contains the collective.
    """
    if line.opcode != "fusion":
        return None
    inside = program.computations[line.called[0]]
    if not any(each.opcode in COLLECTIVES and each.chain for each in inside):
        return None
    targets = {each.attributes for each in inside if each.opcode == "custom-call"}
    ends: dict[str, FusedPart] = {"AsyncCollectiveStart": "start", "AsyncCollectiveDone": "done"}
    return next((part for name, part in ends.items() if any(f'"{name}"' in text for text in targets)), "step")


def matrix_products(instruction: Instruction, program: HloModule) -> int:
    """Return the number of matrix products in an instruction."""
    return sum(is_product(line) for line in program.inside(instruction))


def compute_seconds(instruction: Instruction, program: HloModule, target: Target) -> float:
    """Return the estimated time of an instruction that is not a collective."""
    if instruction.opcode in _FREE or instruction.opcode.endswith(("-start", "-done", "-update")):
        return 0.0
    if _ALLOCATION in instruction.attributes or _UNINITIALIZED in instruction.op_name:  # write nothing
        return 0.0
    cycles = instruction.number("estimated_cycles")
    if cycles and target.clock_hz and cycles < _NO_CYCLES:
        return cycles / target.clock_hz
    products = [(line, flops) for line in program.inside(instruction) if (flops := product_flops(line, program))]
    products_s = sum(flops / target.rate_shares.of(_kind_of(line, program)) for line, flops in products)
    return max(products_s / target.matrix_flops_per_s, _bytes_touched(instruction, program) / target.memory_bytes_per_s)


def sent_bytes(collective: Instruction, program: HloModule, num_devices: int) -> float:
    """Return the bytes that leave a device; 0 for an overflow path, which sends no rows unless lanes overflow."""
    if only_overflows(collective, program):
        return 0.0
    size = _group(collective, num_devices).size
    operands = program.operand_bytes(collective)
    kind = collective.opcode.removesuffix("-start")
    if kind in ("collective-permute", "collective-broadcast"):
        return sum(operands)
    if kind == "ragged-all-to-all":
        operands = [min(operands[:2])]  # at most all rows, and at most the size of the buffer
    factor = {"all-reduce": 2 * (size - 1) / size, "all-gather": size - 1.0}.get(kind, (size - 1) / size)
    return sum(operands) * factor


def only_overflows(instruction: Instruction, program: HloModule) -> bool:
    """Whether an instruction only handles rows that overflow their lane; estimates assume that there are none."""
    name = instruction.op_name
    if not name and instruction.opcode.startswith("ragged-all-to-all"):
        name = program.by_name[instruction.operands[1]].op_name  # of the buffer, unless it is another exchange's result
    return "overflow" in name


def collective_seconds(collective: Instruction, program: HloModule, target: Target, num_devices: int) -> float:
    """Return the estimated time of a collective that has its links to itself."""
    return max(link_seconds(collective, program, target, num_devices).values(), default=0.0)


def link_seconds(collective: Instruction, program: HloModule, target: Target, num_devices: int) -> dict[Link, float]:
    """Return how long a collective's busiest device uses each kind of link; a group of one device uses none."""
    groups = groups_of(collective, num_devices)
    ranks = groups.shape[1]
    if ranks == 1:
        return {}
    nodes = groups // (target.node_devices or num_devices)
    sharing = np.unique((nodes[:, :, None] == nodes[:, None, :]).sum(axis=-1))  # ranks of a group that share a node
    found = [shares(ranks, per_node, "all-to-all" not in collective.opcode) for per_node in sharing.tolist()]
    num_bytes = sent_bytes(collective, program, num_devices)
    used: dict[Link, tuple[Linear, float]] = {
        "inside": (target.link, max(share.inside for share in found)),
        "between": (target.network, max(share.between for share in found)),
    }
    return {name: link.seconds(share * num_bytes) for name, (link, share) in used.items() if share}


def groups_of(collective: Instruction, num_devices: int) -> np.ndarray:
    """Return the groups of devices of a collective, one in each row; for a permute, source and target of each message.

    Raises HloError if the groups have an unknown notation.
    """
    text = collective.attributes
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]+\})\}", text):
        return np.array([group.split(",") for group in re.findall(r"\{([\d,]+)\}", listed[1])], int)
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota(iota[2], iota[3]).reshape(_numbers(iota[1]))
    if (over := _OVER_MESH.search(text)) and (groups := _groups_over_mesh(*over.groups())) is not None:
        return groups
    if unknown := re.search(r"replica_groups=(?!\{\}).*?(?=, \w+=|$)", text):
        raise HloError(
            f"{collective.name} has {unknown[0]}, a form of groups that is not known: use a version of jax that "
            "pyproject.toml allows"
        )
    return np.arange(num_devices)[None]


def _groups_over_mesh(
    axes: str, listed: str | None, sizes: str | None, order: str | None, grouped: str
) -> np.ndarray | None:
    """Return the groups of devices over some axes of a mesh, in the order in which these are listed; None if the mesh
    has no such axes.

    `'a':(p)s` is a part of axis a: of its ranks as an array p × s × rest, the middle dimension.
    """
    mesh = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    devices = np.array(_numbers(listed), int) if listed else _iota(sizes or str(math.prod(mesh.values())), order)
    # parts of axes: the name, the product of the sizes of earlier parts, and the size
    inside = [(name, int(p or 1), int(s or mesh.get(name, 0))) for name, p, s in _GROUP_AXIS.findall(grouped)]
    inside = [part for part in inside if part[2] != 1]
    parts: list[tuple[str, int, int]] = []
    for axis, size in mesh.items():
        ends = {1, size, *(end for name, p, s in inside if name == axis for end in (p, p * s))}
        parts += [(axis, low, high // low) for low, high in itertools.pairwise(sorted(ends))]
    shape = [size for *_, size in parts]
    if not set(inside) <= set(parts) or math.prod(shape) != devices.size:
        return None
    places = [*(place for place, part in enumerate(parts) if part not in inside), *map(parts.index, inside)]
    return devices.reshape(shape).transpose(places).reshape(-1, math.prod(size for *_, size in inside))


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Return the numbers of devices in an array of these sizes, with its axes in this order."""
    shape = _numbers(sizes)
    return np.arange(math.prod(shape)).reshape(shape).transpose(_numbers(order) if order else None)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _group(collective: Instruction, num_devices: int) -> np.ndarray:
    """Return the devices of the first group."""
    return groups_of(collective, num_devices)[0]


def is_product(line: Instruction) -> bool:
    """Whether an instruction is itself a matrix product."""
    if line.opcode == "custom-call":
        return bool(_GEMM.search(line.attributes) or _GROUPED.search(line.op_name)) or is_attention(line)
    return line.opcode in ("dot", "convolution", "ragged-dot")


def is_attention(line: Instruction) -> bool:
    """Whether an instruction is flash attention, forward or backward."""
    return line.opcode == "custom-call" and bool(_FLASH.search(line.attributes) or _SPLASH.search(line.op_name))


def product_flops(line: Instruction, program: HloModule) -> float:
    """Return the floating-point operations of a matrix product or attention; 0 for other instructions."""
    if is_attention(line):
        return _attention_flops(line, program)
    if line.opcode == "custom-call" and _GROUPED.search(line.op_name):
        return _grouped_flops(line, program)
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d",]+)', line.attributes)
    if not contracted or not is_product(line):
        return 0.0
    (left, *_), (result, *_) = arrays(program.by_name[line.operands[0]].shape), arrays(line.shape)
    return 2.0 * math.prod(result.dims) * math.prod(left.dims[int(n)] for n in re.findall(r"\d+", contracted[1]))


def _kind_of(line: Instruction, program: HloModule) -> str:
    """Return the kind of a product's operands, by which its rate is known; kernels are taken to have bfloat16."""
    if is_attention(line) or (line.opcode == "custom-call" and _GROUPED.search(line.op_name)):
        return "bfloat16"
    most = max(arrays(program.by_name[name].shape)[0].bits for name in line.operands[:2])
    if most == _FLOAT32_BITS:
        return "exact" if _EXACT.search(line.attributes) else "float32"
    return "fp8" if most == _FP8_BITS else "bfloat16"


def _grouped_flops(line: Instruction, program: HloModule) -> float:
    """Return the FLOPs of a product of rows in groups, of the rows that exist if routing is balanced.

    Of its arrays only the rows [S, D] and [S, F] have two dimensions: its operands, or one of them and the result.
    """
    shapes = [program.by_name[name].shape for name in line.operands] + [line.shape]
    sides = [array.dims for shape in shapes for array in arrays(shape) if len(array.dims) == _MATRIX_DIMS]
    if len(sides) < _MATRIX_DIMS:
        return 0.0
    (rows, width), (_, other), *_ = sides
    return 2.0 * line.filled * rows * width * other


def _attention_flops(line: Instruction, program: HloModule) -> float:
    """Return the FLOPs of causal flash attention: half of all pairs, two products forward and five backward
    (Dao 2023). The two backward kernels of splash attention compute the weights twice, with seven products in total.
    """
    if kernel := _SPLASH.search(line.op_name):
        operands = [arrays(program.by_name[name].shape)[0] for name in line.operands]
        query, _, value = [each for each in operands if each.bits == 16][:3]  # masks have other types
        *leading, tokens, width = query.dims
        of_keys, of_values = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}[kernel[1]]
        return math.prod(leading) * tokens**2 * float(of_keys * width + of_values * value.dims[-1])
    (query, *_), (key, *_) = (arrays(program.by_name[name].shape) for name in line.operands[:2])
    sequences, tokens, heads, width = query.dims
    return (5 if "Backward" in line.attributes else 2) * sequences * heads * tokens * key.dims[1] * width


def _bytes_touched(instruction: Instruction, program: HloModule) -> float:
    """Return the bytes of operands and results; for slices and gathers only the part that is read or written."""
    if instruction.opcode == "fusion":
        lines = program.computations[instruction.called[0]]
        reads = sum(_read_bytes(line, lines, program) for line in lines if line.opcode == "parameter")
        return reads + _written_bytes(lines[-1], instruction, program)
    operands = program.operand_bytes(instruction)
    if instruction.opcode in _PARTIAL_READS:
        return 2 * num_bytes(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1]
    return sum(operands) + num_bytes(instruction.shape)


def _read_bytes(parameter: Instruction, lines: tuple[Instruction, ...], program: HloModule) -> float:
    users = [line for line in lines if parameter.name in line.operands]
    if users and all(line.opcode in _PARTIAL_READS and line.operands[0] == parameter.name for line in users):
        return sum(num_bytes(line.shape) for line in users)
    if users and all(line.opcode == "dynamic-update-slice" and line.operands[0] == parameter.name for line in users):
        return 0.0
    return num_bytes(parameter.shape)


def _written_bytes(root: Instruction, fusion: Instruction, program: HloModule) -> float:
    outputs = [program.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return sum(
        num_bytes(program.by_name[line.operands[1]].shape)
        if line.opcode == "dynamic-update-slice"
        else num_bytes(line.shape)
        for line in outputs
    )
