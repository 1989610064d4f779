"""Collapse is reported once per block, from counts of every step, and again only after the block recovered."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.config import Config, LogConfig, ModelConfig, MoEConfig
from moe_jax.telemetry.router_alarms import Alarms, load_statistics
from tests.telemetry.test_meter import Records

EVEN, THREE, ONE = [0.25] * 4, [0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]


class Told(Records):
    """In the place of a RunLog, with lines that are no warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[str] = []

    def info(self, text: str) -> None:
        self.reported.append(text)


def run(loads: list[list[list[float]]], every: int = 1, **settings) -> Told:
    """Steps from 1 on; dense blocks lie between those of the loads."""
    model = ModelConfig(num_layers=4, moe=MoEConfig(num_experts=4, moe_layer_freq=2))
    log = Told()
    alarms = Alarms(Config(model=model, log=LogConfig(**({"alarm_entropy": None} | settings))), log)
    for step, load in enumerate(loads, start=1):
        load_ME = np.array(load, np.float32)
        alarms.count(jnp.asarray(load_ME))
        if step % every == 0:
            alarms.check(step, load_statistics(load_ME))
    return log


def test_an_unused_expert_is_reported_once_until_it_is_used() -> None:
    both, one, none = [THREE, THREE], [EVEN, THREE], [EVEN, EVEN]
    log = run([none, both, both, both, one, none, one, one, one], alarm_unused_steps=3)
    text = "no token has chosen 1 of 4 experts (3) for log.alarm_unused_steps=3 steps"
    assert log.warnings == [f"step 4: block 1: {text}", f"step 4: block 3: {text}", f"step 9: block 3: {text}"]
    over = "has recovered: all of its experts are used"
    assert log.reported == [f"step 5: block 1 {over}", f"step 6: block 3 {over}"]
    assert [record["step"] for record in log if "alarm" in record] == [4, 4, 9]
    assert [record["alarm_over"] for record in log if "alarm_over" in record] == [f"block 1 {over}", f"block 3 {over}"]


def test_steps_between_records_count() -> None:
    """A load at the step of a record says nothing of those before."""
    used_between = [[THREE, EVEN], [EVEN, EVEN]] * 3
    assert not run(used_between[1:] + used_between[:1], every=2, alarm_unused_steps=3).warnings
    assert len(run([[THREE, EVEN]] * 6, every=2, alarm_unused_steps=3).warnings) == 1


def test_counting_starts_no_program_on_the_devices() -> None:
    """It would wait for the step that was begun meanwhile, and the record with it."""
    load_ME = jnp.asarray([EVEN, THREE], jnp.float32)
    alarms = Alarms(Config(model=ModelConfig(num_layers=2, moe=MoEConfig(num_experts=4))), Told())
    with jax.transfer_guard_host_to_device("disallow"):
        for _ in range(3):
            alarms.count(load_ME)


def test_an_uneven_load_is_reported_once_until_it_is_even_enough() -> None:
    log = run([[EVEN, ONE], [ONE, ONE], [EVEN, THREE]], alarm_unused_steps=None, alarm_entropy=0.7)
    text = "the load's entropy is 0.00 of an even one's, below log.alarm_entropy=0.7"
    assert log.warnings == [f"step 1: block 3: {text}", f"step 2: block 1: {text}"]
    assert log.reported == [f"step 3: block {block} has recovered: its load is more even" for block in (1, 3)]


def test_nothing_is_reported_where_no_alarm_is_wanted() -> None:
    assert run([[ONE, ONE]] * 3, alarm_unused_steps=None) == []


def test_statistics_are_those_of_each_block_and_the_worst() -> None:
    found = load_statistics(np.array([EVEN, THREE, ONE], np.float32))
    entropy = 1.5 * math.log(2) / math.log(4)
    assert found["block_load_max_over_mean"] == [1, 2, 4]
    np.testing.assert_allclose(found["block_load_entropy"], [1, entropy, 0], atol=1e-6)
    assert found["load_entropy"] == 0
