"""The pullbacks of forward tasks, until their backward tasks call them, and the weight gradients that these give."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.models.transformer import REMAT_POLICIES
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.trees import Params, Tree
from moe_jax.schedule.actions import Action
from moe_jax.step.scheduled.param_gathering import Regathered, but_experts, differentiate_regathered
from moe_jax.step.scheduled.split_vjp import SplitBackward, differentiate, is_float
from moe_jax.step.scheduled.step_dims import StepDims

TaskKey = tuple[str, int, int]  # op, block, microbatch or piece


class Pullbacks:
    """Differentiates tasks as they run forward, and stores what their B and W tasks need.

    `regathers`: the weights of backward tasks are gathered again, from `blocks`.
    """

    def __init__(self, dims: StepDims, blocks: Mapping[int, Params], regathers: bool):
        self._dims, self._blocks, self._regathers = dims, blocks, regathers
        self.stored: dict[TaskKey, Callable[..., Any]] = {}
        self.regathered: dict[TaskKey, Regathered] = {}  # of tasks whose weights are gathered again
        self.waiting: dict[TaskKey, SplitBackward] = {}  # for W tasks
        self.grads: dict[tuple[str, int], Tree] = {}  # of weights, by op and block, in float32

    def differentiate(
        self, key: TaskKey, function: Callable[[Tree, Tree], Tree], weights: Tree, inputs: Tree, *, remat: bool = False
    ) -> Any:
        """Return `function(weights, inputs)`, and store its pullback.

        With `remat` the pullback recomputes what the config says.
        """
        pull = self._pull(function, remat)
        op, block, _ = key
        again = self._regathers and self._dims.shape.param_gather_of(Action("B", op, block, 0)) is not None
        if again:
            result, self.regathered[key] = differentiate_regathered(pull, weights, inputs)
        else:
            result, self.stored[key] = pull(weights, inputs)
        return result

    def differentiate_sent_again(
        self, key: TaskKey, function: Callable[[Tree, Tree], Tree], weights: Tree, inputs: Tree
    ) -> Any:
        """The same with `remat`, but `give_weights` must follow before `pull`."""
        result, self.stored[key] = differentiate_regathered(self._pull(function, remat=True), weights, inputs)
        return result

    def give_weights(self, key: TaskKey, weights: Tree) -> None:
        """Give the pullback of a task the weights that it was stored without."""
        self.stored[key] = self.stored[key](weights)

    def _pull(self, function: Callable[[Tree, Tree], Tree], remat: bool) -> Callable[[Tree, Tree], Any]:
        if remat and self._dims.compute.remat != "none":
            function = jax.checkpoint(function, policy=REMAT_POLICIES[self._dims.compute.remat])
        return partial(differentiate, function, min_cut=self._dims.min_cut_remat)

    def pull(
        self,
        key: TaskKey,
        cotangents: Sequence[jax.Array],
        replacements: Iterable[tuple[jax.Array, jax.Array]] = (),
    ) -> list[jax.Array]:
        """Return the gradients of a task's inputs; its weight gradients are added up now, or deferred to its W task.

        `replacements`: see `SplitBackward`.
        """
        pulled = SplitBackward(self._in_order(key, self._take(key), cotangents[0]), cotangents, replacements)
        inputs = pulled.inputs()
        if self._dims.shape.split_weight_grad:
            self.waiting[key] = pulled
        else:
            self.add(key[:2], pulled.weights(lambda x: x))
        return inputs

    def is_under_way(self, key: TaskKey) -> bool:
        """Whether weight gradients of a task are still to be added."""
        return key in self.stored or key in self.regathered or key in self.waiting

    def add(self, owner: tuple[str, int], gradient: Tree) -> None:
        """Add a gradient of the weights of an op of a block, in float32."""
        gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)  # also those of casts
        so_far = self.grads.get(owner)
        self.grads[owner] = gradient if so_far is None else jax.tree.map(jnp.add, so_far, gradient)

    def _in_order(self, key: TaskKey, pullback: Callable[..., Any], cotangent: jax.Array) -> Callable[..., Any]:
        """Return a pullback that recomputes nothing before `cotangent` exists, if XLA:CPU could run it too early.

        Attention's collectives over tensor or context ranks are recomputed, too. They would read a value from before a
        loop, and run concurrently with the collectives of the loop (`measure/races.py`). Other compilers keep the
        barriers of `jax.checkpoint`.
        """
        platform, sizes = self._dims.compute.platform, self._dims.config.mesh.sizes
        op, block, _ = key
        communicates = op == "attend" and max(sizes["tensor"], sizes["context"]) > 1
        if platform != "cpu" or self._dims.compute.remat == "none" or not communicates:
            return pullback
        weights = set(map(id, jax.tree.leaves(self._blocks[block])))

        def wait(leaf: jax.Array) -> jax.Array:
            waits = isinstance(leaf, jax.Array) and is_float(leaf) and id(leaf) not in weights
            return depend_on(leaf, cotangent, platform) if waits else leaf

        return jax.tree.map(wait, pullback)

    def _take(self, key: TaskKey) -> Callable[..., Any]:
        if key not in self.regathered:
            return self.stored.pop(key)
        op, block, _ = key
        weights = self._blocks[block]
        own = weights["moe"]["experts"] if op == "expert" else but_experts(weights)
        return self.regathered.pop(key)(own)
