"""The moving average of parameters over steps (`optimizer.ema_decay`): an entry of the training state of its own.

It has the shapes of parameters and is sharded like moments. Validation uses it, and `generate` and exports if asked.
"""

from typing import Any

import jax

from moe_jax.parallel.trees import Params
from moe_jax.step.context import State
from moe_jax.step.optimizers.protocol import unless_bad

AVERAGE = "ema"  # its name in the state, and so in checkpoints


def first_average(params: Params, decay: float | None) -> dict[str, Params]:
    """Return the entry of the first state: the first parameters; nothing without a decay."""
    return {} if decay is None else {AVERAGE: params}


def with_step_added(state: State, learned: Params, is_good: jax.Array, decay: float | None) -> dict[str, Params]:
    """Return the entry after a step: decay · average + (1 - decay) · parameters. A bad step leaves it unchanged.

    `learned` are this device's shards of the parameters after the step.
    """
    if decay is None:
        return {}
    new = jax.tree.map(lambda old, x: decay * old + (1 - decay) * x, state[AVERAGE], learned)
    return {AVERAGE: unless_bad(is_good, new, state[AVERAGE])}


def evaluated(state: Any) -> Any:
    """Return the parameters of a state that validation uses: their average, if there is one."""
    return state.get(AVERAGE, state["params"])
