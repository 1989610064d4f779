"""Which exchange a run takes that leaves it to the machine: the fastest one, timed once for each mesh and size."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
from jax.sharding import Mesh

from moe_jax.config import Config
from moe_jax.measure.interleaved_timing import InterleavedTimes
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.all_to_all import EXCHANGES
from moe_jax.parallel.mesh import make_mesh
from moe_jax.run import choose_exchange
from moe_jax.run.choose_exchange import sizes_of_exchange, time_exchanges, with_fastest_exchange
from tests.small import small_config

SCHEDULED = {"policy": "unified", "microbatches": 2}
ALL = ["flat", "ring", "hier_1d", "hier_2d", "halo", "ragged"]
SECONDS = {name: 0.001 * (1 + place) for place, name in enumerate(reversed(ALL))}


class Timing:
    """Says that exchanges take so long, and remembers what it was asked."""

    def __init__(self, seconds: Mapping[str, float] = SECONDS, failed: Mapping[str, str] | None = None) -> None:
        self.seconds, self.failed = seconds, dict(failed or {})
        self.asked: list[list[str]] = []

    def __call__(self, config: Config, mesh: Mesh, named: Mapping[str, Config]) -> InterleavedTimes:
        self.asked.append(list(named))
        return InterleavedTimes({name: self.seconds[name] for name in named if name in self.seconds}, self.failed)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moe_jax" / "exchanges.json"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto times the exchanges of these devices."""
    monkeypatch.setattr(choose_exchange, "_TIMED", ("cpu",))


def config_of(algorithm: str = "auto", **changes: object) -> Config:
    sizes = {"data": 2, "expert": 4, "exchange": {"ranks_per_node": 2}, "schedule": SCHEDULED, "batch_size": 16}
    config = small_config(**(sizes | changes))  # type: ignore[arg-type]
    return dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, algorithm=algorithm))


def chosen(config: Config, timing: Timing) -> str:
    found = with_fastest_exchange(config, make_mesh(config.mesh), timing)
    assert dataclasses.replace(config, exchange=found.exchange) == found, "nothing else changes"
    return found.exchange.algorithm


@pytest.mark.usefixtures("timed")
def test_the_fastest_is_taken_and_the_table_printed(capsys: pytest.CaptureFixture[str]) -> None:
    timing, config = Timing(SECONDS | {"halo": 0.0001}, {"ring": "ValueError: no"}), config_of()
    del timing.seconds["ring"]  # type: ignore[attr-defined]
    assert chosen(config, timing) == "halo"
    assert sorted(timing.asked[0]) == sorted(ALL)
    title, first, *others = capsys.readouterr().out.splitlines()
    assert title == "exchange.algorithm=halo; one dispatch and one combine:"
    assert first.split() == ["halo", "100", "µs"]
    assert others[-1].split() == ["ring", "left", "out:", "ValueError:", "no"]
    mesh = make_mesh(config.mesh)
    assert ComputeConfig.of(with_fastest_exchange(config, mesh, timing), mesh).exchange == "halo"


@pytest.mark.usefixtures("timed")
def test_times_are_taken_once_for_each_size(cache: Path) -> None:
    timing = Timing()
    for batch_size in (16, 32, 16, 32):
        assert chosen(config_of(batch_size=batch_size), timing) == "ragged"
    assert len(timing.asked) == 2
    cache.unlink()
    assert chosen(config_of(), Timing({"flat": 1.0})) == "flat"


@pytest.mark.usefixtures("timed")
def test_without_any_time_the_default_stays() -> None:
    assert chosen(config_of(), Timing({}, dict.fromkeys(ALL, "no"))) == "auto"


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(
    ("config", "names"),
    [
        (config_of(schedule={}), ["flat", "hier_1d", "hier_2d", "halo"]),
        (config_of(exchange={"ranks_per_node": 4}), ["flat", "ring", "ragged"]),
        (config_of(exchange={"ranks_per_node": 4}, capacity_factor=None), ["flat", "ring"]),
        (config_of(pipeline=2, data=1, grad_accumulation=2), ["flat", "hier_2d", "ragged"]),
    ],
    ids=["plain", "one node", "dropless", "pipelined"],
)
def test_algorithms_that_a_step_can_run_are_timed(config: Config, names: list[str]) -> None:
    timing = Timing()
    chosen(config, timing)
    assert sorted(timing.asked[0]) == sorted(names)


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(
    "config",
    [
        config_of("ring"),
        config_of(num_experts=0, data=8, expert=1, schedule={}, exchange={}),
        config_of(data=8, expert=1, exchange={}),
        config_of(exchange={"ranks_per_node": 4}, schedule={}),
    ],
    ids=["named", "dense", "one rank", "nothing to choose"],
)
def test_nothing_is_timed_without_a_question(config: Config) -> None:
    assert with_fastest_exchange(config, make_mesh(config.mesh), Timing({})) is config


def test_on_simulated_devices_nothing_is_timed() -> None:
    timing = Timing()
    assert chosen(config_of(), timing) == "auto"
    assert not timing.asked


@pytest.mark.usefixtures("timed")
def test_processes_take_what_the_first_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process reads no file of its own, and times only if the first one has no times."""
    given: list[tuple[int, object]] = []
    answers: list[object] = [None, "ring"]

    def from_first(source: int, own: object) -> object:
        given.append((source, own))
        return answers[len(given) - 1]

    monkeypatch.setattr(choose_exchange, "is_main_process", lambda: False)
    monkeypatch.setattr(choose_exchange, "from_process", from_first)
    timing = Timing()
    assert chosen(config_of(), timing) == "ring"
    assert given == [(0, None), (0, "ragged")]
    assert len(timing.asked) == 1


@pytest.mark.usefixtures("timed")
def test_exchanges_are_timed_for_real_and_a_wrong_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are compared with those of flat: a ring that sends nothing would be the fastest."""
    config = config_of()
    mesh = make_mesh(config.mesh)
    sizes = sizes_of_exchange(config, mesh)
    assert (sizes.padded, sizes.experts, sizes.filled, sizes.tokens) == (2 * 6, 2, 3, 12)
    monkeypatch.setitem(EXCHANGES, "ring", EXCHANGES["ring"]._replace(finish=lambda under_way, ranks: under_way[0]))
    named = dict(choose_exchange._possible(config, mesh))
    found = time_exchanges(config, mesh, {name: named[name] for name in ("flat", "ring", "hier_2d", "ragged")})
    assert found.seconds.keys() == {"flat", "hier_2d", "ragged"}
    assert found.failed.keys() == {"ring"}
    assert "numbers differ from those that flat sends" in found.failed["ring"]
