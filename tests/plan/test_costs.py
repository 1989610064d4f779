"""Rates by which a schedule is made."""

from moe_jax.config import Config, Schedule
from moe_jax.plan.costs import rates_of


def test_what_leaves_a_node_of_gpus_is_timed_with_the_network() -> None:
    config = Config()
    node, nodes = (rates_of(config, "gpu", 8, devices) for devices in (8, 64))
    assert node.exchange == node.reduce == nodes.exchange
    assert nodes.reduce.seconds(1e9) > 3 * node.reduce.seconds(1e9)
    assert rates_of(config, "gpu", 16, 64).exchange == nodes.reduce
    assert rates_of(config, "tpu", 8, 64) == rates_of(config, "tpu", 8, 8)


def test_given_rates_come_before_typical_ones() -> None:
    given = Config(schedule=Schedule(device_tflops=100.0, link_gb_per_s=10.0, network_gb_per_s=2.0))
    rates = rates_of(given, "gpu", 8, 64)
    assert rates.flops_per_s == 100e12
    assert abs(rates.exchange.seconds(10e9) - 1) < 1e-3
    assert abs(rates.reduce.seconds(2e9) - 1) < 1e-3
