"""The validation batches of each source, and their losses."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_jax.config import Config
from moe_jax.data.loader import validation_batches
from moe_jax.data.samples import Samples
from moe_jax.data.token_marks import num_targets

Rows = NDArray[np.int32]


class ValidationSet(NamedTuple):
    """The validation batches of one source."""

    batches: Sequence[Rows]  # the rows of this process, [S, data.seq_len + 1] each
    weights: Sequence[int]  # of each batch: its predicted tokens, or 1 if all tokens are predicted

    @classmethod
    def of(cls, samples: Samples, config: Config, rows: Sequence[range]) -> "ValidationSet":
        """Read this process's `rows` of the `train.eval_batches` batches. Raises DataError."""
        size, count = config.train.batch_size, config.train.eval_batches
        own = validation_batches(samples, batch_size=size, num_batches=count, rows=rows)
        if not config.data.mask_documents:
            return cls(own, [1] * len(own))
        whole = validation_batches(samples, batch_size=size, num_batches=count, rows=[range(size)])
        return cls(own, [num_targets(batch) for batch in whole])

    def loss(self, loss_of: Callable[[Rows], float]) -> float:
        """Return the mean loss over the predicted tokens of all batches, in nats per token."""
        return mean([loss_of(batch) for batch in self.batches], self.weights)


def loss_metrics(losses: Sequence[float], weights: Sequence[float], names: Sequence[str]) -> Mapping[str, float]:
    """Return the validation loss of a run, and that of each source of a mixture by name.

    That of the run is the mean over sources by their `weights` in the last step. `names` are empty without a mixture.
    """
    counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight]
    weighted = mean([loss for loss, _ in counted], [weight for _, weight in counted])
    by_source = {f"validation_loss/{name}": loss for name, loss in zip(names, losses, strict=False)}
    return {"validation_loss": weighted} | by_source


def mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean."""
    return math.fsum(map(operator.mul, values, weights)) / math.fsum(weights)
