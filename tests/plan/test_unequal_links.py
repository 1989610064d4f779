"""Plans for unequal links: each rank sends and receives at its own rates, and collectives wait for the slowest."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_jax.cli import plan as command
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import UserError
from moe_jax.plan.clusters import Cluster, find_cluster
from moe_jax.plan.clusters.hardware import Level, LinkCurve, LinkRates
from moe_jax.plan.collective_costs import CollectiveCosts, DeviceGroup
from moe_jax.plan.estimate import estimate
from moe_jax.plan.links_text import links_text

BENCH = "configs/bench/fine_grained.yaml"
SITE = "base: h100\ndevices: 8\nlevels:\n  - {name: NVLink, devices: 4, gb_per_s: 400}\n"
FABRIC = "  - {name: InfiniBand, devices: 8, gb_per_s: 50, alpha_us: 20"
SLOW = "[{devices: 6}, {devices: 1, send: 0.5}, {devices: 1, receive: 0.25}]"
MB = 1e6


def described(folder: Path, rates: str | None) -> Cluster:
    (folder / "site.yaml").write_text(f"{SITE}{FABRIC}{'' if rates is None else f', rates: {rates}'}}}\n")
    return find_cluster(str(folder / "site.yaml"))


def test_a_file_gives_the_rates_of_devices_in_a_row(tmp_path: Path) -> None:
    inside, between = described(tmp_path, SLOW).levels
    assert between.rates == (LinkRates(6), LinkRates(1, send=0.5), LinkRates(1, receive=0.25))
    assert between.bytes_per_s == 50e9 / 4, "the slowest direction of the slowest device"
    equal = described(tmp_path, None)
    assert (inside, between.with_equal_links()) == equal.levels
    assert described(tmp_path, SLOW).with_equal_links().levels == equal.levels


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ("slow", "levels[1].rates must be a list of 1 to 1,024 sections with devices, send, receive"),
        ("[]", "levels[1].rates must be a list of 1 to 1,024 sections"),
        ("[{devices: 4}]", "levels[1].rates are of 4 devices, and devices=8: give the rates of all 8"),
        ("[{devices: 8, send: 0}]", "levels[1].rates[0].send=0 must be a number above 0 and up to 1"),
        ("[{devices: 8, receive: 2}]", "levels[1].rates[0].receive=2 must be a number above 0 and up to 1"),
        ("[{devices: 8, recieve: 1}]", "levels[1].rates[0] has recieve: did you mean receive?"),
        ("[8]", "levels[1].rates[0] must be a section with devices, send, receive"),
    ],
)
def test_rates_that_make_no_sense_are_refused(rates: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        described(tmp_path, rates)
    assert str(error.value).startswith(f"cluster file {tmp_path / 'site.yaml'}: {message}")


def slow_twin(sent: list[list[float]], rates: Sequence[LinkRates], bytes_per_s: float) -> float:
    """Seconds until the last rank has sent and received its bytes; `sent[i][j]` go from rank i to rank j."""
    last_s = 0.0
    for rank, (_, send, receive) in enumerate(rates):
        sent_s = sum(sent[rank]) / (send * bytes_per_s)
        received_s = sum(row[rank] for row in sent) / (receive * bytes_per_s)
        last_s = max(last_s, sent_s, received_s)
    return last_s


@pytest.mark.parametrize("seed", range(8))
def test_collectives_take_as_long_as_the_rank_that_sends_or_receives_longest(seed: int) -> None:
    draw, published, ranks = random.Random(seed), 5e10, range(8)
    rates = tuple(LinkRates(1, *(draw.choice([0.125, 0.25, 0.5, 1.0]) for _ in range(2))) for _ in ranks)
    level = Level(name="links", devices=8, bytes_per_s=published, ring=LinkCurve(0.0), message_s=0.0, rates=rates)
    level = dataclasses.replace(level, bytes_per_s=published * level.slowest)
    costs = CollectiveCosts(dataclasses.replace(find_cluster("h100x8"), levels=(level,)))
    group = DeviceGroup(8, 1)
    to_all = [[MB / 8 * (i != j) for j in ranks] for i in ranks]
    to_next = [[MB * (j == (i + 1) % 8) for j in ranks] for i in ranks]
    assert costs.exchange(MB, group, "flat").seconds == pytest.approx(slow_twin(to_all, rates, published))
    assert costs.ring(MB, group) == pytest.approx(slow_twin(to_next, rates, published))
    assert costs.send(MB, group) == pytest.approx(slow_twin(to_next, rates, published))


def test_slow_links_between_nodes_cost_only_what_leaves_nodes(tmp_path: Path) -> None:
    slow, equal = (CollectiveCosts(described(tmp_path, rates)) for rates in (SLOW, None))
    assert slow.ring(MB, DeviceGroup(4, 1)) == equal.ring(MB, DeviceGroup(4, 1)), "inside a node"
    alpha_s = 20e-6
    for of in (lambda costs: costs.ring(MB, DeviceGroup(2, 4)), lambda costs: costs.send(MB, DeviceGroup(8, 1))):
        assert of(slow) - alpha_s == pytest.approx(4 * (of(equal) - alpha_s))


def test_slow_links_between_nodes_make_another_mesh_the_best(tmp_path: Path) -> None:
    """As docs/plan.md says."""
    site = "base: h100\ndevices: 16\nlevels:\n  - {name: NVLink, devices: 8, gb_per_s: 450, alpha_us: 15}\n"
    fabric = "  - {name: InfiniBand, devices: 16, gb_per_s: 50"
    links = {
        "| all alike |": "",
        "| 4 devices send at 0.5 × and receive at 0.25 × |": (
            ", rates: [{devices: 12}, {devices: 4, send: 0.5, receive: 0.25}]"
        ),
    }
    plans = {  # as `moe_jax.plan` writes them for the two clusters
        "expert=16": "mesh.expert=16 schedule.microbatches=2 schedule.bucket_cap_mb=128 optimizer.zero=3",
        "expert=8 pipeline=2": "mesh.expert=8 mesh.pipeline=2 schedule.microbatches=1 schedule.grad_reduce=end "
        "schedule.bucket_cap_mb=null schedule.pipeline=coscheduled train.grad_accumulation=4 optimizer.zero=1",
    }
    page = Path("docs/plan.md").read_text(encoding="utf-8")
    for row, rates in links.items():
        (tmp_path / "site.yaml").write_text(f"{site}{fabric}{rates}}}\n")
        cluster = find_cluster(str(tmp_path / "site.yaml"))
        configs = (load_config(BENCH, ["train.batch_size=32", *settings.split()]) for settings in plans.values())
        times = " | ".join(f"{1e3 * estimate(config, cluster).step_s:.1f} ms" for config in configs)
        assert f"{row} {times} |" in page


def test_links_that_are_given_and_alike_change_nothing(tmp_path: Path) -> None:
    config = load_config(BENCH)
    given, left_out = (described(tmp_path, rates) for rates in ("[{devices: 8}]", None))
    assert estimate(config, given).step_s == estimate(config, left_out).step_s
    assert links_text(config, given) is None
    assert links_text(config, left_out) is None


def test_uneven_shares_of_experts_send_as_much(tmp_path: Path) -> None:
    """Dropless exchanges send a buffer of one size to each rank, so slow links are no reason for fewer experts."""
    dropless = ["model.moe.capacity_factor=null", "exchange.rank_capacity_factor=null", "exchange.algorithm=flat"]
    uneven = ["migration.enabled=true", "migration.replicas=4", "migration.rank_speeds=[1,1,1,1,1,1,0.5,0.5]"]
    cluster = described(tmp_path, SLOW)
    equal, fewer = (estimate(load_config(BENCH, [*dropless, *own]), cluster) for own in ([], uneven))
    assert fewer.busy.exchange == pytest.approx(equal.busy.exchange)


def test_the_plan_says_what_slow_links_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, config = described(tmp_path, SLOW), load_config(BENCH)
    text = links_text(config, cluster)
    equal_s = estimate(config, described(tmp_path, None)).step_s
    assert text == (
        "InfiniBand: 1 device sends at 0.5 × and receives at 1 × the rate, 1 device sends at 1 × and receives at 0.25 "
        "× the rate; collectives over these links wait for the slowest. With equal links this plan would take "
        f"{1e3 * equal_s:.3g} ms. Uneven shares of experts would change no exchange."
    )
    assert equal_s < estimate(config, cluster).step_s
    described(tmp_path, SLOW)  # the file again
    line = f"plan --model {BENCH} --cluster {tmp_path / 'site.yaml'} mesh.data=1 mesh.expert=8 train.batch_size=16"
    monkeypatch.setattr("sys.argv", line.split())
    command.main()
    assert "links       InfiniBand: 1 device sends at 0.5 ×" in capsys.readouterr().out
