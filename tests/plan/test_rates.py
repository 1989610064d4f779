"""The rates by which training orders tasks: of known GPUs their published ones, unless the config has its own."""

import pytest

from moe_jax.config.yaml_io import load_config
from moe_jax.plan.clusters import PRESETS, find_cluster
from moe_jax.plan.costs import rates_of
from moe_jax.plan.rates import with_rates, with_rates_of

OWN = ["schedule.device_tflops=300", "schedule.link_gb_per_s=100", "schedule.network_gb_per_s=10"]


@pytest.mark.parametrize("kind", ["TPU v5p", "cpu", "NVIDIA unheard of", ""])
def test_other_devices_keep_typical_rates(kind):
    config = load_config(None, [])
    assert with_rates_of(config, kind) is config


def test_a_run_on_h100_orders_by_the_rates_that_plans_of_h100_set():
    config = load_config(None, [])
    found = with_rates_of(config, "NVIDIA H100 80GB HBM3").schedule
    planned = with_rates(config.schedule, find_cluster("h100x16"))
    assert found == planned
    assert (found.link_gb_per_s, found.network_gb_per_s) == (342.0, 42.5)  # 0.76 of 450 and 0.85 of 50
    node, nodes = (rates_of(with_rates_of(config, "NVIDIA H100"), "gpu", 8, 1, devices) for devices in (8, 64))
    assert node.reduce.beta_s == node.exchange.beta_s < nodes.reduce.beta_s


@pytest.mark.parametrize("kind", [name for name, preset in PRESETS.items() if preset.device.platform == "gpu"])
def test_the_network_is_slower_than_links_inside_nodes(kind):
    """Of every kind of GPU that jax's names tell, also where NVLink joins a rack."""
    found = with_rates_of(load_config(None, []), kind).schedule
    assert found.link_gb_per_s is None or found.network_gb_per_s < found.link_gb_per_s


def test_rates_of_the_config_stay():
    config = load_config(None, OWN)
    assert with_rates_of(config, "NVIDIA H100 80GB HBM3") == config
    some = with_rates_of(load_config(None, OWN[:1]), "NVIDIA H100").schedule
    assert (some.device_tflops, some.link_gb_per_s) == (300.0, 342.0)
