"""Sequences of several documents: each is trained on as if it were alone."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from moe_jax.config import Config, DataConfig
from moe_jax.data.mixture import Mixture
from moe_jax.data.token_marks import FIRST, UNCOUNTED, mark_documents
from moe_jax.run.step_hooks import _validate
from moe_jax.run.validation import ValidationSet
from moe_jax.step.trainer import make_trainer
from tests.small import first_params, small_config
from tests.step.gradients import mesh_of

LENGTH, END = 12, 3


def of_documents(config: Config) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, mask_documents=True))


def alone(documents: list[np.ndarray]) -> np.ndarray:
    """Each document at the beginning of a sequence of its own; what fills it is not counted."""
    batch = np.full((len(documents), LENGTH + 1), 5 | FIRST | UNCOUNTED, np.int32)
    for row, document in zip(batch, documents, strict=True):
        row[: len(document)] = document
    return batch


@pytest.mark.parametrize("layers", [1, 3], ids=["one-block", "a-loop-of-blocks"])
def test_the_loss_is_the_mean_over_documents_alone_weighted_by_their_tokens(layers: int) -> None:
    """Routing does not depend on other tokens here: nothing is dropped."""
    moe = {"capacity_factor": None, "moe_layer_freq": 1, "aux_loss_coeff": 0.0}
    config = of_documents(small_config(1, 1, model={"num_layers": layers}, batch_size=2, seq_len=LENGTH, **moe))
    rng = np.random.default_rng(0)
    pairs = [[np.append(rng.integers(4, 32, n - 1), END) for n in (first, LENGTH + 1 - first)] for first in (4, 9)]
    packed = np.stack([np.concatenate(pair) for pair in pairs]).astype(np.int32)
    mark_documents(packed, END)
    evaluate = make_trainer(config, mesh_of(config)).evaluate
    params = first_params(config.model)
    total = count = 0.0
    for documents in zip(*pairs, strict=True):
        own = sum(len(document) - 1 for document in documents)
        total, count = total + own * evaluate(params, alone(list(documents))), count + own
    assert count == 2 * (LENGTH - 1), "every token but each document's first"
    np.testing.assert_allclose(evaluate(params, packed), total / count, rtol=1e-6)
    unmarked = packed & ~FIRST
    assert abs(float(evaluate(params, unmarked)) - total / count) > 1e-4, "documents that see each other differ"


def test_a_batch_without_targets_has_no_loss() -> None:
    config = of_documents(small_config(1, 1, model={"num_layers": 1}, batch_size=2, seq_len=LENGTH, num_experts=0))
    batch = np.full((2, LENGTH + 1), 5 | UNCOUNTED, np.int32)
    assert make_trainer(config, mesh_of(config)).evaluate(first_params(config.model), batch) == 0


def test_a_validation_loss_is_the_mean_over_the_targets_of_all_batches() -> None:
    means, data = {0: 1.0, 1: 3.0}, DataConfig()
    run = SimpleNamespace(
        validation=[ValidationSet([0, 1], [3, 1])],
        on_mesh=lambda x: x,
        config=SimpleNamespace(data=data),
        mixture=Mixture.of(data, 1, 0),
    )
    losses = _validate(lambda params, batch, slots: means[batch], {"params": (), "step": 1}, run)
    assert losses == {"validation_loss": 1.5}
