"""Rates by which a schedule is made."""

import pytest

from moe_jax.config import Config, ExchangeConfig, ScheduleConfig
from moe_jax.plan.costs import rates_of, task_times


def test_what_leaves_a_node_of_gpus_is_timed_with_the_network() -> None:
    config = Config()
    node, nodes = (rates_of(config, "gpu", 8, 1, devices) for devices in (8, 64))
    assert node.exchange == node.reduce == nodes.exchange
    assert nodes.reduce.seconds(1e9) > 3 * node.reduce.seconds(1e9)
    assert rates_of(config, "gpu", 16, 1, 64).exchange == rates_of(config, "gpu", 8, 2, 64).exchange == nodes.reduce
    assert rates_of(config, "tpu", 8, 1, 64) == rates_of(config, "tpu", 8, 1, 8)


def test_given_rates_come_before_typical_ones() -> None:
    given = Config(schedule=ScheduleConfig(device_tflops=100.0, link_gb_per_s=10.0, network_gb_per_s=2.0))
    rates = rates_of(given, "gpu", 8, 1, 64)
    assert rates.flops_per_s == 100e12
    assert abs(rates.exchange.seconds(10e9) - 1) < 1e-3
    assert abs(rates.reduce.seconds(2e9) - 1) < 1e-3


def test_tensor_ranks_gather_what_was_exchanged_and_replicated_rows_travel_from_each_of_them() -> None:
    def dispatch_s(form: str, tensor_ranks: int) -> float:
        config = Config(exchange=ExchangeConfig(tensor_form=form))  # type: ignore[arg-type]
        rates = rates_of(config, "gpu", 8, tensor_ranks, 64)
        transfer = task_times(config, "gpu", 2**20, 8, tensor_ranks, [[0.0]] * 6, rates, {}).transfer["dispatch"]
        return transfer.link.seconds(transfer.num_bytes)

    config = Config()
    moe = config.model.moe
    assert moe.capacity_factor is not None
    own = 2**20 * moe.top_k * moe.capacity_factor * config.model.hidden_size * 2
    rates = rates_of(config, "gpu", 8, 2, 64)
    gather_s, exchange_s = own * rates.gather.beta_s, own * 7 / 8 * rates.exchange.beta_s
    assert dispatch_s("sharded", 2) == pytest.approx(exchange_s + gather_s, rel=1e-3)
    assert dispatch_s("replicated", 2) == pytest.approx(2 * exchange_s + gather_s, rel=1e-3)
    assert dispatch_s("sharded", 1) < dispatch_s("sharded", 2)
