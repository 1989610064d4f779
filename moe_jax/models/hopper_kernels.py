"""The kernels of `grouped_hopper.py`, in Pallas with its Mosaic backend. S rows, L groups, D and F widths."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.models.grouped_hopper import Blocks
from moe_jax.models.grouped_matmul import group_of_tiles

_MULTIPROCESSORS = 132  # of H100 and H200; for programs that are compiled without the device
_COPIED = 64  # width of what one copy brings: 128 bytes, the widest swizzle of shared memory
_MULTIPLIERS = 2  # warpgroups that multiply
_REGISTERS = 40  # of each thread that only starts copies
_Ref = Any  # a reference to memory, or a view of one


def multiply_rows(x: jax.Array, w: jax.Array, size_L: jax.Array, contracted: int, blocks: Blocks) -> jax.Array:
    """Multiply rows by the matrix of their group, summed over dimension 1 or 2 of the matrix; 0 beyond the groups."""
    kernel = _kernel(
        functools.partial(_rows_kernel, blocks=blocks, contracted=contracted),
        jax.ShapeDtypeStruct((len(x), w.shape[3 - contracted]), x.dtype),
        "grouped_rows",
    )
    group_of = group_of_tiles(size_L, len(x) // blocks.rows, blocks.rows).astype(jnp.int32)
    filled = (size_L.sum() // blocks.rows).astype(jnp.int32)
    return kernel(jnp.minimum(group_of, len(size_L) - 1), filled[None], x, w)


def multiply_transposed(x_SD: jax.Array, dy_SF: jax.Array, size_L: jax.Array, blocks: Blocks) -> jax.Array:
    """Multiply the transposed rows of each group [D, s] by its gradients [s, F]; 0 for an empty group."""
    kernel = _kernel(
        functools.partial(_weights_kernel, blocks=blocks),
        jax.ShapeDtypeStruct((len(size_L), x_SD.shape[1], dy_SF.shape[1]), x_SD.dtype),
        "grouped_weights",
    )
    bound_L1 = jnp.cumsum(jnp.pad(size_L, (1, 0))).astype(jnp.int32)
    return kernel(bound_L1, x_SD, dy_SF)


def _kernel(body: Callable[..., None], result: jax.ShapeDtypeStruct, name: str) -> Any:
    return plgpu.kernel(
        body,
        out_type=result,
        grid=(getattr(jax.local_devices()[0], "core_count", _MULTIPROCESSORS),),
        grid_names=("sm",),
        num_threads=_MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=name,
    )


def _swizzled() -> tuple[Any, ...]:
    """Return the layout of shared memory in which neither copies nor products conflict in a bank."""
    return plgpu.TilingTransform((8, _COPIED)), plgpu.SwizzleTransform(2 * _COPIED)


def _rows_kernel(group_of: _Ref, filled: _Ref, x: _Ref, w: _Ref, y: _Ref, *, blocks: Blocks, contracted: int) -> None:
    is_transposed = contracted == 2
    row_blocks, column_blocks = x.shape[0] // blocks.rows, y.shape[1] // blocks.columns
    w_block = (blocks.columns, _COPIED) if is_transposed else (_COPIED, blocks.columns)
    specs = [
        _spec((blocks.rows, _COPIED), lambda k: (0, k), blocks),
        _spec(w_block, (lambda k: (0, k)) if is_transposed else (lambda k: (k, 0)), blocks),
    ]
    pipeline = _pipeline((x.shape[1] // _COPIED,), specs, blocks)

    def compute(copies: Any, staged: _Ref) -> None:
        warpgroup = jax.lax.axis_index("warpgroup")

        @plgpu.nd_loop((filled[0] * column_blocks,), collective_axes="sm")
        def _(loop: plgpu.NDLoopInfo) -> None:
            m, n = plgpu.planar_snake(loop.index[0], (filled[0], column_blocks), blocks.along, blocks.band)
            rows, columns = pl.ds(m * blocks.rows, blocks.rows), pl.ds(n * blocks.columns, blocks.columns)
            matrix = w.at[group_of[m]]

            def multiply(_: Any, x_block: _Ref, w_block: _Ref, total: _Ref) -> _Ref:
                own = w_block.transpose((1, 0)) if is_transposed else w_block
                if blocks.splits_rows:
                    plgpu.wgmma(total, x_block.at[pl.ds(warpgroup * blocks.half[0], blocks.half[0])], own)
                else:
                    part = pl.ds(warpgroup * blocks.half[1], blocks.half[1])
                    own = w_block.at[part].transpose((1, 0)) if is_transposed else w_block.at[:, part]
                    plgpu.wgmma(total, x_block, own)
                plgpu.wgmma_wait(blocks.unfinished)
                return total

            store = functools.partial(_store, staged, y.at[rows, columns], blocks)
            pipeline(multiply, store)(
                x.at[rows, :], matrix.at[columns, :] if is_transposed else matrix.at[:, columns], allocations=copies
            )

        @plgpu.nd_loop(((row_blocks - filled[0]) * column_blocks,), collective_axes="sm")
        def _(loop: plgpu.NDLoopInfo) -> None:
            m, n = filled[0] + loop.index[0] // column_blocks, loop.index[0] % column_blocks
            rows, columns = pl.ds(m * blocks.rows, blocks.rows), pl.ds(n * blocks.columns, blocks.columns)

            @pl.when(warpgroup < _MULTIPLIERS)
            def _() -> None:
                _write(staged, y.at[rows, columns], blocks, lambda *_: jnp.zeros((_COPIED, _COPIED), y.dtype))

    allocations = pipeline(None, None).get_allocations(x, w.at[0])
    _scoped(compute, allocations, y.dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _weights_kernel(bound_of: _Ref, x: _Ref, dy: _Ref, dw: _Ref, *, blocks: Blocks) -> None:
    groups, row_blocks, column_blocks = dw.shape[0], dw.shape[1] // blocks.rows, dw.shape[2] // blocks.columns
    specs = [
        _spec((_COPIED, blocks.rows), lambda k: (k, 0), blocks),
        _spec((_COPIED, blocks.columns), lambda k: (k, 0), blocks),
    ]

    def compute(copies: Any, staged: _Ref) -> None:
        warpgroup = jax.lax.axis_index("warpgroup")

        @plgpu.nd_loop((groups, row_blocks * column_blocks), collective_axes="sm")
        def _(loop: plgpu.NDLoopInfo) -> None:
            group, block = loop.index
            m, n = plgpu.planar_snake(block, (row_blocks, column_blocks), blocks.along, blocks.band)
            rows, columns = pl.ds(m * blocks.rows, blocks.rows), pl.ds(n * blocks.columns, blocks.columns)
            first = pl.multiple_of(bound_of[group], _COPIED)
            own = pl.ds(first, x.shape[0])  # beyond the group's end nothing is read
            steps = (bound_of[group + 1] - first) // _COPIED

            def multiply(_: Any, x_block: _Ref, dy_block: _Ref, total: _Ref) -> _Ref:
                if blocks.splits_rows:
                    part = pl.ds(warpgroup * blocks.half[0], blocks.half[0])
                    plgpu.wgmma(total, x_block.at[:, part].transpose((1, 0)), dy_block)
                else:
                    part = pl.ds(warpgroup * blocks.half[1], blocks.half[1])
                    plgpu.wgmma(total, x_block.transpose((1, 0)), dy_block.at[:, part])
                plgpu.wgmma_wait(blocks.unfinished)
                return total

            store = functools.partial(_store, staged, dw.at[group, rows, columns], blocks)
            _pipeline((steps,), specs, blocks)(multiply, store)(
                x.at[own, rows], dy.at[own, columns], allocations=copies
            )

    some = _pipeline((x.shape[0] // _COPIED,), specs, blocks)
    _scoped(compute, some(None, None).get_allocations(x, dy), dw.dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _spec(shape: tuple[int, int], index: Callable[[Any], tuple[Any, Any]], blocks: Blocks) -> plgpu.BlockSpec:
    return plgpu.BlockSpec(
        shape, index, transforms=_swizzled(), memory_space=plgpu.SMEM, delay_release=blocks.unfinished
    )


def _pipeline(grid: tuple[Any, ...], specs: list[plgpu.BlockSpec], blocks: Blocks) -> Callable[..., Any]:
    def of(multiply: Any, store: Any) -> Any:
        def nothing(*_: Any) -> None:
            return None

        return plgpu.emit_pipeline_warp_specialized(
            multiply or nothing,
            grid=grid,
            memory_registers=_REGISTERS,
            in_specs=specs,
            max_concurrent_steps=blocks.steps,
            wg_axis="warpgroup",
            num_compute_wgs=_MULTIPLIERS,
            compute_context=store or nothing,
        )

    return of


def _scoped(compute: Callable[..., None], allocations: Any, dtype: Any) -> None:
    """Call `compute` with the shared memory of the copies, and two pieces of result for each warpgroup."""
    staged = plgpu.SMEM((_MULTIPLIERS, 2, _COPIED, _COPIED), dtype, transforms=_swizzled())
    pl.run_scoped(compute, allocations, staged, collective_axes="warpgroup")


def _store(staged: _Ref, result: _Ref, blocks: Blocks, accumulate: Callable[[_Ref], object]) -> None:
    """Sum the products of a block in registers, and write the sums."""

    def with_total(total: _Ref) -> None:
        accumulate(total)
        sums = total[...].astype(result.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _write(staged, result, blocks, lambda rows, columns: sums[rows, columns])

    pl.run_scoped(with_total, plgpu.ACC(blocks.half, jnp.float32))


def _write(staged: _Ref, result: _Ref, blocks: Blocks, piece_of: Callable[[slice, slice], jax.Array]) -> None:
    """Write a warpgroup's half of a block piece by piece, through shared memory: while one is copied, the next is
    written."""
    warpgroup, (num_rows, num_columns) = jax.lax.axis_index("warpgroup"), blocks.half
    row_offset = warpgroup * num_rows if blocks.splits_rows else 0
    column_offset = 0 if blocks.splits_rows else warpgroup * num_columns
    pieces = itertools.product(range(0, num_rows, _COPIED), range(0, num_columns, _COPIED))
    for number, (i, j) in enumerate(pieces):
        slot = number % 2
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        staged[warpgroup, slot] = piece_of(slice(i, i + _COPIED), slice(j, j + _COPIED))
        plgpu.commit_smem()
        to = result.at[pl.ds(row_offset + i, _COPIED), pl.ds(column_offset + j, _COPIED)]
        plgpu.copy_smem_to_gmem(staged.at[warpgroup, slot], to)
