"""A step on a mixture records the loss of each source, and computes nothing else differently."""

import dataclasses

import jax
import numpy as np
import pytest

from moe_jax.config import Config
from moe_jax.config.sections import DataSource
from moe_jax.data.token_marks import UNCOUNTED, mark_documents, mark_sources
from moe_jax.step.trainer import make_trainer
from tests.small import small_config, tokens_of
from tests.step.gradients import first_state, mesh_of

SOURCE_B = np.array([0, 2, 2, 0, 0, 1, 2, 0])  # of each sequence; source 3 has none
UNIFIED = {"policy": "unified", "microbatches": 2}
END = 3


def mixed(config: Config, **train: object) -> Config:
    sources = tuple(DataSource(path=f"s{number}", weight=1) for number in range(4))
    data = dataclasses.replace(config.data, sources=sources, mask_documents=bool(train.pop("documents", False)))
    return dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, **train))


CASES = {
    "plain, around a ring": mixed(small_config(1, 2, context=2), documents=True),
    "scheduled, in chunks": mixed(small_config(2, 2, schedule=UNIFIED), loss_chunk=5, z_loss_multiplier=0.1),
    "pipelined, in parts": mixed(small_config(1, 2, pipeline=2, grad_accumulation=2, model={"num_layers": 4})),
}


@pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))
def test_the_loss_of_a_source_is_that_of_its_sequences(config: Config) -> None:
    """Validation on the same batch, of which only these sequences count, computes the same."""
    trainer, batch = make_trainer(config, mesh_of(config)), tokens_of(config)
    if config.data.mask_documents:
        mark_documents(batch, END)
    mark_sources(batch, SOURCE_B)
    state = first_state(config, trainer)
    expected = []
    for source in range(3):
        uncounted = np.where(source == SOURCE_B, 0, UNCOUNTED).astype(np.int32)
        expected.append(float(trainer.evaluate(state["params"], batch | uncounted[:, None])))
    whole = float(trainer.evaluate(state["params"], batch))
    metrics = jax.device_get(trainer.step(state, batch)[1])
    np.testing.assert_allclose(metrics["source_loss"][:3], expected, rtol=2e-6)
    np.testing.assert_allclose(metrics["cross_entropy"], whole, rtol=2e-6)
    assert np.isnan(metrics["source_loss"][3])
    assert np.ptp(expected) > 1e-3


def test_marks_of_sources_change_no_parameter() -> None:
    config = CASES["scheduled, in chunks"]
    without = dataclasses.replace(config, data=dataclasses.replace(config.data, sources=()))
    batch, after = tokens_of(config), []
    for each in (config, without):
        trainer = make_trainer(each, mesh_of(each))
        if each is config:
            mark_sources(marked := batch.copy(), SOURCE_B)
        state, metrics = trainer.step(first_state(each, trainer), marked if each is config else batch)
        after.append(jax.device_get((state, metrics["loss"], metrics["grad_norm"])))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7), *after)
