"""Plans for devices of different speeds: the slowest decides, and uneven shares of experts help."""

import dataclasses
from pathlib import Path

import pytest

from moe_jax.cli import plan as command
from moe_jax.config import Config, MigrationConfig
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import ConfigError, UserError
from moe_jax.plan.clusters import Cluster, find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.least_time import least_step_s
from moe_jax.plan.rank_speeds import first_counts, rank_speeds
from moe_jax.plan.speeds_text import speeds_text, with_rank_speeds
from moe_jax.plan.step_times import Step

BENCH = "configs/bench/fine_grained.yaml"
SITE = "base: h100\ndevices: 8\nlevels: [{name: NVLink, devices: 8, gb_per_s: 450}]\n"
SPEEDS = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5)
SLOW = dataclasses.replace(find_cluster("h100x8"), speeds=((6, 1.0), (2, 0.5)))


def config_of(*overrides: str) -> Config:
    return load_config(BENCH, ["model.moe.capacity_factor=null", "exchange.rank_capacity_factor=null", *overrides])


def described(folder: Path, speeds: str) -> Cluster:
    (folder / "site.yaml").write_text(f"{SITE}speeds: {speeds}\n")
    return find_cluster(str(folder / "site.yaml"))


def test_a_file_gives_the_speeds_of_devices_in_a_row(tmp_path: Path) -> None:
    cluster = described(tmp_path, "[{devices: 6}, {devices: 2, speed: 0.5}]")
    assert cluster.speeds == SLOW.speeds
    assert rank_speeds(config_of(), cluster) == SPEEDS
    assert rank_speeds(config_of("mesh.data=2", "mesh.expert=4"), cluster) == (1.0, 1.0, 0.5, 0.5), "the slowest of two"
    assert rank_speeds(config_of("mesh.expert=4", "mesh.tensor=2"), cluster) == (1.0, 1.0, 1.0, 0.5)
    assert rank_speeds(config_of(), find_cluster("h100x8")) is None


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ("fast", "speeds must be a list of 1 to 1,024 sections with devices, speed"),
        (
            "[{devices: 6}, {devices: 3, speed: 0.5}]",
            "speeds are of 9 devices, and devices=8: give the speeds of all 8",
        ),
        ("[{devices: 8, speed: 0}]", "speeds[0].speed=0 must be a number above 0 and up to 1"),
        ("[{devices: 8, speed: .nan}]", "speeds[0].speed=nan must be a number above 0 and up to 1"),
        ("[{devices: 8, speed: 2}]", "speeds[0].speed=2 must be a number above 0 and up to 1"),
        ("[{devices: -8}]", "speeds[0].devices=-8 must be a whole number from 1 to"),
        ("[{device: 8}]", "speeds[0] has device: did you mean devices?"),
    ],
)
def test_speeds_that_make_no_sense_are_refused(speeds: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        described(tmp_path, speeds)
    assert str(error.value).startswith(f"cluster file {tmp_path / 'site.yaml'}: {message}")


def test_a_step_takes_as_long_as_its_slowest_device() -> None:
    """A cluster whose devices are all half as fast takes twice as long to compute, and sends as fast."""
    config, fast = config_of(), find_cluster("h100x8")
    half = dataclasses.replace(fast, speeds=((8, 0.5),))
    normal, slow, one_slow = (estimate(config, each) for each in (fast, half, SLOW))
    assert slow.busy.compute == pytest.approx(2 * normal.busy.compute)
    assert slow.busy.exchange == pytest.approx(normal.busy.exchange)
    assert one_slow.step_s == slow.step_s, "equal shares: one slow device makes all wait"


@pytest.mark.parametrize("replicas", [0, 1, 2, 4])
def test_uneven_shares_are_as_fast_as_their_slowest_rank(replicas: int) -> None:
    settings = ["migration.enabled=true", f"migration.rank_speeds={list(SPEEDS)}", f"migration.replicas={replicas}"]
    config, fast = config_of(*settings), find_cluster("h100x8")
    counts = first_counts(config, SPEEDS)
    assert sum(counts) == 64
    assert max(counts) <= 8 + replicas
    slowest = max(count / speed for count, speed in zip(counts, SPEEDS, strict=True))
    expert, equal = (Step(each, fast).compute()["expert"].of("F", 1) for each in (config, config_of()))
    assert expert == pytest.approx(equal * slowest / 8, rel=0.15), "of as many experts at full speed"
    found = estimate(config, fast)
    assert least_step_s(config, fast) <= found.step_s
    of_cluster = dataclasses.replace(config, migration=MigrationConfig(enabled=True, replicas=replicas))
    assert estimate(of_cluster, SLOW).step_s == found.step_s, "a cluster's speeds count as those of the setting"
    assert with_rank_speeds(of_cluster, SLOW) == config
    assert with_rank_speeds(config_of(), SLOW) == config_of(), "experts that do not migrate have no use for them"


def test_plans_say_what_uneven_shares_would_save() -> None:
    equal = speeds_text(config_of(), SLOW)
    assert equal is not None
    advice = equal.partition("plan again with ")[2].split()
    assert advice[:2] == ["migration.enabled=true", "migration.rank_speeds=[1,1,1,1,1,1,0.5,0.5]"]
    uneven = speeds_text(config_of(*advice), SLOW)
    assert uneven is not None
    took = equal.partition("With uneven shares a step would take ")[2].partition(" ms")[0]
    assert float(took) == pytest.approx(1e3 * estimate(config_of(*advice), SLOW).step_s, rel=0.01)
    assert f"With equal shares a step would take {1e3 * estimate(config_of(), SLOW).step_s:.3g} ms" in uneven
    assert "2 ranks at 0.5 with 4 of a block's experts" in uneven
    assert speeds_text(config_of(), find_cluster("h100x8")) is None
    padded = speeds_text(load_config(BENCH), SLOW)
    assert padded is not None
    assert padded.endswith("model.moe.capacity_factor=1.25 pads all experts alike: uneven shares need null")


def test_the_command_plans_for_slow_devices_and_writes_their_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described(tmp_path, "[{devices: 6}, {devices: 2, speed: 0.5}]")
    line = f"plan --model {BENCH} --cluster {tmp_path / 'site.yaml'} --out {tmp_path / 'plan.yaml'} "
    line += "model.moe.capacity_factor=null mesh.expert=8 train.batch_size=16 optimizer.zero=0 "
    line += "migration.enabled=true migration.replicas=2"
    monkeypatch.setattr("sys.argv", line.split())
    command.main()
    assert "speeds      2 ranks at 1 with 10 of a block's experts, 4 ranks at 1 with 9" in capsys.readouterr().out
    assert load_config(tmp_path / "plan.yaml").migration.rank_speeds == SPEEDS


def test_a_mesh_with_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 8 speeds, and mesh\.expert=4 is 4 expert ranks: use 4 speeds"):
        config_of("mesh.expert=4", "migration.enabled=true", f"migration.rank_speeds={list(SPEEDS)}")
