"""Moments in host memory (`optimizer.offload_moments`), as in ZeRO-Offload (Ren et al. 2021), updated on the device.

Arrays are updated one after another: their moments are copied to the device, and the new ones back. An array that
stacks blocks is updated some blocks at a time, so that the device has the moments of few blocks of one array.

Moments of vectors stay on the device: they are few.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from moe_jax.parallel.host_memory import PINNED, after, check_host_memory, to_device, to_memory_of
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.trees import Tree
from moe_jax.plan.offload import BYTES_AT_ONCE
from moe_jax.step.optimizers.protocol import Parameter, all_after, of_parameter

# some of the parameters, in a tree in which `optax.MaskedNode` stands for the others → their transformation. Its update
# also takes `first_row`, the index of its arrays' first row in the whole arrays
RuleOf = Callable[[Tree], optax.GradientTransformationExtraArgs]


def is_offloaded(parameter: Parameter) -> bool:
    """Whether the moments of an array are in host memory."""
    return parameter.is_matrix


def in_host_memory(placed: Tree, parameters: Tree) -> Tree:
    """Return the shardings of an optimizer's state with the moments of matrices in host memory.

    Raises ConfigError if the devices cannot use memory of their host.
    """
    known = dict(jax.tree.leaves_with_path(parameters))

    def own(path: tuple[Any, ...], sharding: Any) -> Any:
        parameter = of_parameter(path, known)
        if parameter is None or not is_offloaded(parameter):
            return sharding
        check_host_memory(sharding.mesh.devices.flat[0], "optimizer.offload_moments")
        return sharding.with_memory_kind(PINNED)

    return jax.tree.map_with_path(own, placed)


def array_by_array(rule_of: RuleOf, parameters: Tree, platform: str) -> optax.GradientTransformationExtraArgs:
    """Return the transformation of all `Parameter`s, with the moments of matrices in host memory between updates.

    The update of a block must not depend on other blocks or arrays. Its values are those of `rule_of(parameters)`.
    """
    known, structure = jax.tree.flatten(parameters)
    alone = [number for number, parameter in enumerate(known) if is_offloaded(parameter)]
    together = [number for number in range(len(known)) if number not in alone]

    def only(numbers: Sequence[int], tree: Tree) -> Tree:
        leaves = structure.flatten_up_to(tree)  # type: ignore[attr-defined]
        kept = [leaf if number in numbers else optax.MaskedNode() for number, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, kept)

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *, is_good: jax.Array
    ) -> tuple[optax.Updates, optax.OptState]:
        before, new_state = dict(jax.tree.leaves_with_path(state)), dict[Any, jax.Array]()
        updates = structure.flatten_up_to(grads)  # type: ignore[attr-defined]
        last: jax.Array | None = None
        for numbers in filter(None, [together, *([number] for number in alone)]):
            rule, own_params = rule_of(only(numbers, parameters)), only(numbers, params)
            shapes = jax.eval_shape(rule.init, own_params)
            paths = [path for path, _ in jax.tree.leaves_with_path(shapes)]
            own_state = jax.tree.unflatten(jax.tree.structure(shapes), [before[path] for path in paths])
            own = only(numbers, grads), own_state, own_params
            if numbers is together:
                moved = rule.update(*own, is_good=is_good)
            else:
                moved = _some_blocks_at_a_time(rule, known[numbers[0]], *own, is_good, last, platform)
            for number, moved_one in zip(numbers, jax.tree.leaves(moved[0]), strict=True):
                updates[number] = last = moved_one
            new_state |= zip(paths, jax.tree.leaves(moved[1]), strict=True)
        state = jax.tree.map_with_path(lambda path, _: new_state[path], state)
        found = jax.tree.unflatten(structure, updates)
        return (found if last is None else all_after(last, found, platform)), state

    return optax.GradientTransformationExtraArgs(rule_of(parameters).init, update)


def _some_blocks_at_a_time(
    rule: optax.GradientTransformationExtraArgs,
    parameter: Parameter,
    grads: Tree,
    state: optax.OptState,
    params: Tree,
    is_good: jax.Array,
    last: jax.Array | None,
    platform: str,
) -> tuple[Tree, optax.OptState]:
    """Return the update of one array, which replaces its gradient, and its state. It begins once `last` exists."""
    (grad,), counts = jax.tree.leaves(grads), [x if not x.ndim else None for x in jax.tree.leaves(state)]
    state, structure = jax.tree.leaves(state), jax.tree.structure(state)
    if last is not None and platform == "cpu":  # where all devices must come to collectives in one order
        grad = depend_on(grad, last, platform)
    elif last is not None:
        state = after(state, last)
    pieces = _pieces(parameter, grad.shape)

    def of_piece(number: jax.Array, done: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        def here(x: jax.Array) -> jax.Array:
            size = x.shape[0] // pieces
            return jax.lax.dynamic_slice_in_dim(x, number * size, size)

        def put(x: jax.Array, piece: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(x, piece, number * len(piece), axis=0)

        updates, moments = done
        own = [to_device(here(x)) if count is None else count for x, count in zip(moments, counts, strict=True)]
        own_grads = jax.tree.unflatten(jax.tree.structure(grads), [here(updates)])
        first = number * (len(grad) // pieces)
        found, moved = rule.update(
            *(own_grads, jax.tree.unflatten(structure, own), jax.tree.map(here, params)),
            is_good=is_good,
            first_row=first,
        )
        stored = [
            put(x, to_memory_of(x, new)) if count is None else new
            for x, new, count in zip(moments, jax.tree.leaves(moved), counts, strict=True)
        ]
        return put(updates, jax.tree.leaves(found)[0]), stored

    update, moved = jax.lax.fori_loop(0, pieces, of_piece, (grad, state))
    return jax.tree.unflatten(jax.tree.structure(grads), [update]), jax.tree.unflatten(structure, moved)


def _pieces(parameter: Parameter, shape: tuple[int, ...]) -> int:
    """Return the number of equal pieces of an array that are updated one after another: whole blocks.

    There are at least two, if there are two blocks: no compiler copies what a loop's later iterations read beforehand.
    """
    if parameter.dims[0] != "layers":
        return 1
    blocks = shape[0]
    at_once = max(1, min(BYTES_AT_ONCE // (4 * math.prod(shape[1:])), blocks // 2))
    return next(pieces for pieces in range(1, blocks + 1) if blocks % pieces == 0 and blocks // pieces <= at_once)
