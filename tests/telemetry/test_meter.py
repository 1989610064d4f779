"""Which steps are recorded, what counts as their time, and the arithmetic of the speeds."""

import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from moe_jax.config import Config, DataConfig, ExchangeConfig, LogConfig, ModelConfig, MoEConfig, TrainConfig
from moe_jax.config.sections import DataSource
from moe_jax.errors import DivergedError
from moe_jax.plan.resources import train_flops_per_token
from moe_jax.telemetry.meter import Meter
from moe_jax.telemetry.step_completion import Clock as TrainClock
from moe_jax.telemetry.step_completion import CompletionListener, StepCompletion, Usage

BATCH, LENGTH = 4, 32
MATRIX_RATE = 1e11  # FLOP/s


class Clock:
    """A clock that only moves when a test advances it."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class Records(list):
    """In the place of a RunLog."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def write(self, record: dict) -> None:
        self.append(record)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class WhenAskedFor:
    """In the place of CompletionListener: a step ends when it is waited for, in the thread that trains."""

    def __init__(self, now: TrainClock) -> None:
        self.now = now

    def watch(self, arrays: dict) -> SimpleNamespace:
        return SimpleNamespace(arrays=arrays, wait=lambda: (self.now(), False))


class GoodSteps(Meter):
    """Takes steps for good that do not report that they are bad."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments, listener=WhenAskedFor)

    def add(self, step: int, metrics: dict, timed: bool = True) -> None:
        super().add(step, {"bad_step": jnp.int32(0)} | metrics, timed)


def metered(every: int, steps: int = 12, **moe: object) -> tuple[Meter, Records]:
    config = Config(
        model=ModelConfig(moe=MoEConfig(**moe)),
        data=DataConfig(seq_len=LENGTH),
        train=TrainConfig(steps=steps, batch_size=BATCH),
        log=LogConfig(every=every, tensorboard=False),
    )
    records = Records()
    return GoodSteps(config, records, MATRIX_RATE), records


@pytest.mark.parametrize(("first_step", "recorded"), [(0, [1, 5, 10, 12]), (7, [10, 12]), (11, [12])])
def test_the_first_the_last_and_every_nth_step_are_recorded(first_step, recorded, clock):
    reader, records = metered(every=5)
    for step in range(first_step + 1, 13):
        clock.now_s += 1
        reader.add(step, {"loss": jnp.float32(step / 8)})
    reader.finish()
    assert [(record["step"], record["loss"]) for record in records] == [(step, step / 8) for step in recorded]


@pytest.mark.parametrize(("stopping", "recorded"), [(False, [1]), (True, [1, 3])])
def test_the_step_that_a_run_is_stopped_after_is_recorded(stopping, recorded, clock):
    reader, records = metered(every=5)
    for step in (1, 2, 3):
        clock.now_s += 1
        reader.add(step, {})
    reader.finish(stopping=stopping)
    assert [record["step"] for record in records] == recorded


def test_a_step_is_read_only_when_the_next_one_has_started(clock):
    """Or the devices would wait for the host after every step."""
    reader, records = metered(every=1)
    for step in (1, 2, 3):
        clock.now_s += 1
        reader.add(step, {})
        assert [record["step"] for record in records] == list(range(1, step))


def test_step_time_is_the_mean_since_the_last_record_without_the_pauses(clock):
    reader, records = metered(every=4)
    for step, step_s in enumerate((8, 1, 2, 3, 1, 1, 1, 5), start=1):
        clock.now_s += step_s
        reader.add(step, {})
        with reader.paused():
            clock.now_s += 1000
    assert [(record["step"], record["step_s"]) for record in records] == [(1, 8), (4, 2), (8, 2)]


def test_a_pause_begins_when_the_step_under_way_is_recorded(clock):
    reader, records = metered(every=1)
    clock.now_s += 3
    reader.add(1, {})
    with reader.paused():
        assert [record["step_s"] for record in records] == [3]


def test_a_step_that_is_not_timed_counts_for_no_time_and_no_step(clock):
    """As a step under the profiler: the step that is recorded alone has no speed at all."""
    reader, records = metered(every=3)
    for step in range(1, 8):
        with reader.paused():
            clock.now_s += 1000 if step in (5, 7) else 0
        clock.now_s += 0 if step in (5, 7) else step
        reader.add(step, {}, timed=step not in (5, 7))
    reader.finish(stopping=True)
    assert [(record["step"], record.get("step_s")) for record in records] == [(1, 1), (3, 2.5), (6, 5), (7, None)]


def test_each_step_is_timed_but_for_those_around_a_pause(clock):
    """The pause waits for the step under way, which the next `add` finds done."""
    reader, _ = metered(every=5)
    seconds = []
    for step in range(1, 8):
        reader.add(step, {}, timed=step != 5)
        seconds.append(reader.step_s)
        clock.now_s += step
        if step == 3:
            with reader.paused():
                clock.now_s += 1000
    assert seconds == [None, 1, 2, None, 4, None, 6]


def test_speeds_follow_from_the_step_time(clock):
    reader, records = metered(every=1, num_experts=3)
    clock.now_s += 0.5
    reader.add(1, {"expert_load": jnp.full((4, 3), 1 / 3)})
    reader.finish()
    tokens_per_s = BATCH * LENGTH / 0.5
    utilisation = tokens_per_s * train_flops_per_token(ModelConfig(moe=MoEConfig(num_experts=3)), LENGTH) / MATRIX_RATE
    expected = {"step": 1, "step_s": 0.5, "tokens_per_s": tokens_per_s, "mfu": pytest.approx(utilisation)}
    balance = {"block_load_max_over_mean": [1.0] * 4, "block_load_entropy": [1.0] * 4, "load_entropy": 1.0}
    assert records == [{**expected, "bad_steps": 0, "expert_load": [[0.333333] * 3] * 4, **balance}]


def records_with_loads(experts: int, expert_load_every: int | None, clock) -> list[int]:
    """Steps of them, of the 4 blocks of a run of 24 steps."""
    config = Config(
        model=ModelConfig(moe=MoEConfig(num_experts=experts)),
        train=TrainConfig(steps=24),
        log=LogConfig(every=2, expert_load_every=expert_load_every, alarm_entropy=None),
    )
    records = Records()
    reader = GoodSteps(config, records, MATRIX_RATE)
    for step in range(1, 25):
        clock.now_s += 1
        reader.add(step, {"expert_load": jnp.full((4, experts), 1 / experts)})
    reader.finish()
    assert all(len(record["block_load_entropy"]) == 4 for record in records)
    return [record["step"] for record in records if "expert_load" in record]


def test_loads_of_many_experts_are_in_fewer_records(clock):
    """So that metrics.jsonl stays small, and the numbers made of the loads are in all records."""
    assert records_with_loads(256, None, clock) == [1, *range(2, 25, 2)]
    assert records_with_loads(1280, None, clock) == [1, 10, 20, 24]
    assert records_with_loads(1280, 2, clock) == [1, *range(4, 25, 4)]


def test_rows_dropped_without_a_capacity_are_warned_of_once_even_between_records(clock):
    reader, records = metered(every=5, capacity_factor=None)
    for step, fraction in enumerate((0, 0, 0.125, 0, 0.5), start=1):
        clock.now_s += 1
        reader.add(step, {"dropped_fraction": jnp.float32(fraction)})
    reader.finish()
    assert [record["step"] for record in records] == [1, 5]
    assert records.warnings == [
        f"step 3 dropped 0.12 of all rows, as exchange.rank_capacity_factor={ExchangeConfig().rank_capacity_factor} "
        "leaves "
        "some expert "
        "rank no room for them: "
        "use a larger one, or null for the worst case (this is said once; dropped_fraction continues counting)"
    ]


def test_a_capacity_that_drops_is_no_reason_for_a_warning(clock):
    reader, records = metered(every=1)
    clock.now_s += 1
    reader.add(1, {"dropped_fraction": jnp.float32(0.5)})
    reader.finish()
    assert records.warnings == []


@pytest.mark.parametrize("strange", ["nan", "inf"])
def test_bad_steps_are_recorded_and_counted_until_there_are_too_many(strange, clock):
    """What then happens is in test_divergence.py."""
    good, bad = jnp.float32(1), jnp.float32(strange)
    reader, records = metered(every=5)
    for step, loss in ((1, good), (2, bad), (3, bad), (4, bad), (5, bad)):
        clock.now_s += 1
        assert not reader.bad_steps.too_many
        reader.add(step, {"loss": loss, "grad_norm": good, "bad_step": jnp.int32(loss is bad)})
    reader.finish()
    assert reader.bad_steps.too_many
    assert not reader.bad_steps.may_save(12)
    assert [(record["step"], str(record["loss"]), record["bad_steps"]) for record in records] == [
        (1, "1.0", 0),
        (5, strange, 3),
    ]


def test_a_bad_step_is_no_time_for_a_checkpoint_but_at_the_end(clock):
    reader, _ = metered(every=5)
    assert reader.bad_steps.may_save(4)
    reader.add(4, {"loss": jnp.float32("nan"), "grad_norm": jnp.float32(1), "bad_step": jnp.int32(1)})
    reader.finish()
    assert not reader.bad_steps.may_save(4)
    assert reader.bad_steps.may_save(12)


def test_losses_of_sources_are_recorded_by_name(clock):
    sources = tuple(DataSource(path=f"texts/{name}.jsonl", weight=1) for name in ("web", "code", "books"))
    config = Config(data=DataConfig(path=None, sources=sources), model=ModelConfig(moe=MoEConfig(num_experts=0)))
    reader = GoodSteps(config, records := Records(), MATRIX_RATE)
    reader.add(1, {"loss": jnp.float32(2), "grad_norm": jnp.float32(1), "source_loss": jnp.array([2.5, jnp.nan, 1.5])})
    clock.now_s += 1
    reader.finish()
    found = {name: value for name, value in records[0].items() if name.startswith(("loss/", "source"))}
    assert found == {"loss/web": 2.5, "loss/books": 1.5}, "a source without tokens in the step has none"


def test_a_validation_that_is_not_finite_ends_the_run(clock):
    reader, records = metered(every=5)
    with pytest.raises(DivergedError, match=r"^step 8 has validation_loss=nan: .*learning_rate below 0.001"):
        reader.record_validation(8, {"validation_loss": float("nan")})
    reader.add(9, {"loss": jnp.float32("nan"), "grad_norm": jnp.float32(1), "bad_step": jnp.int32(1)})
    reader.finish()
    reader.record_validation(9, {"validation_loss": float("nan")})  # bad steps have a way out of their own
    assert [record["step"] for record in records] == [8, 9]


class Planned:
    """In the place of CompletionListener: steps end at given seconds, and may be heard of late."""

    def __init__(self, ends: list[tuple[float, bool]]) -> None:
        self.ends = iter(ends)

    def __call__(self, now: TrainClock) -> "Planned":
        return self

    def watch(self, arrays: dict) -> SimpleNamespace:
        end_s, is_late = next(self.ends)
        return SimpleNamespace(arrays=arrays, wait=lambda: (Usage(end_s, 0.0), is_late))


def rates(every: int, ends: list[tuple[float, bool]], rate: float = MATRIX_RATE) -> Records:
    config = Config(
        data=DataConfig(seq_len=LENGTH),
        train=TrainConfig(steps=len(ends), batch_size=BATCH),
        log=LogConfig(every=every, tensorboard=False),
    )
    records = Records()
    meter = Meter(config, records, rate, listener=Planned(ends))
    for step in range(1, len(ends) + 1):
        meter.add(step, {"bad_step": jnp.int32(0)})
    meter.finish(stopping=True)
    return records


def test_the_last_step_is_timed_from_the_end_of_the_one_before(clock):
    """Though that is asked for when the last one runs: here the host is slow, and devices wait for it."""
    records = rates(every=4, ends=[(101, False), (102, False), (103, False), (104, False), (105, False)])
    assert [record["step_s"] for record in records] == [1, 1, 1]


def test_no_rate_is_of_a_step_that_was_done_before_the_host_could_hear_of_the_one_before(clock):
    """The host is suspended for 20 s while steps 3 and 4 run, a second each; it hears of both at once."""
    records = rates(every=1, ends=[(101, False), (102, False), (123, False), (123.001, True), (124.001, False)])
    assert [round(record["step_s"] + 1e-5, 3) for record in records] == [1, 1, 21, 10.501, 1]


def test_a_rate_is_of_a_tenth_of_a_second_at_least(clock):
    """Single steps of 10 ms are heard of up to 8 ms late."""
    ends = [(100 + 0.01 * step + (0.008 if step % 2 else 0), False) for step in range(1, 31)]
    records = rates(every=1, ends=ends)
    assert all(record["step_s"] == pytest.approx(0.01, rel=0.1) for record in records[10:])


def test_no_model_flop_utilisation_above_one_is_recorded_and_that_is_reported_once(clock):
    flops = BATCH * LENGTH * train_flops_per_token(ModelConfig(), LENGTH)
    records = rates(every=1, ends=[(101, False), (101.5, False), (102, False), (104, False)], rate=flops)
    assert [record.get("mfu") for record in records] == [1, None, None, 0.5]
    assert [record["tokens_per_s"] for record in records] == [BATCH * LENGTH / step_s for step_s in (1, 0.5, 0.5, 2)]
    assert records.warnings == [
        f"step 2 ran {2 * flops:.3g} FLOP/s, more than the {flops:.3g} that were measured as the device's peak before "
        "the first step, when it was perhaps busy: such steps have no MFU"
    ]


class Running:
    """A step's result that the devices have not made yet."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def is_ready(self) -> bool:
        return self.done.is_set()

    def block_until_ready(self) -> None:
        assert self.done.wait(60)


def observed(completion: StepCompletion) -> None:
    assert completion._observed.wait(60)


def test_a_step_ends_when_the_devices_are_done_whenever_the_host_asks(clock):
    listener = CompletionListener(TrainClock(None, print))
    steps = [Running() for _ in range(4)]
    first, second = listener.watch(steps[0]), listener.watch(steps[1])
    clock.now_s = 101
    steps[0].done.set()
    observed(first)
    clock.now_s = 102
    steps[1].done.set()
    observed(second)
    clock.now_s = 110
    assert [each.wait() for each in (first, second)] == [(Usage(101, 0), False), (Usage(102, 0), False)]
    third, fourth = listener.watch(steps[2]), listener.watch(steps[3])
    clock.now_s = 120
    steps[3].done.set()  # as if the host had slept until both were done
    steps[2].done.set()
    assert [each.wait() for each in (third, fourth)] == [(Usage(120, 0), False), (Usage(120, 0), True)]


def test_a_step_that_ran_before_its_call_returned_is_not_late(clock):
    """As small ones do on a CPU."""
    listener = CompletionListener(TrainClock(None, print))
    for end_s in (101, 102, 103):
        clock.now_s = end_s
        completion = listener.watch({"loss": jnp.float32(1)})
        assert completion.wait() == (Usage(end_s, 0), False)
