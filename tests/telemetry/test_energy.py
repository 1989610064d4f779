"""Energy of GPUs in a run's records, with a stand-in for NVIDIA's library."""

import json
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from moe_jax.config import Config, TrainConfig
from moe_jax.telemetry.energy import energy_counter
from moe_jax.telemetry.meter import Meter
from moe_jax.telemetry.run_log import RunLog
from tests.telemetry.test_meter import WhenAskedFor

GPUS = [SimpleNamespace(platform="gpu", local_hardware_id=number) for number in range(2)]


class Nvml(SimpleNamespace):
    """Two GPUs, 1 and "GPU-b" as CUDA_VISIBLE_DEVICES may name them; millijoules that grow with each look."""

    used = 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetName(self, handle: str) -> str:
        return self.__dict__.get("names", {}).get(handle, "H100")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"index {index}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        return f"uuid {name}"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self.looked = {*self.__dict__.get("looked", ()), handle}
        return self.used


def test_gpus_are_those_that_cuda_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml := Nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    joules = energy_counter(GPUS)
    assert joules is not None
    nvml.used = 3500
    assert joules() == 7.0
    assert nvml.looked == {"index 0", "index 1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-b")
    nvml.looked = ()
    assert energy_counter(GPUS) is not None
    assert nvml.looked == {"index 3", "uuid GPU-b"}


def test_unlike_gpus_in_an_order_of_cuda_s_own_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(names={"index 2": "A100"}))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert energy_counter(GPUS) is None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert energy_counter(GPUS) is not None


def test_a_count_that_fails_later_ends_no_run(tmp_path, capsys) -> None:
    readings = iter([1.0])

    def lost() -> float:
        for reading in readings:
            return reading
        raise RuntimeError("GPU is lost")

    metrics = {"loss": np.float32(1), "grad_norm": np.float32(1), "bad_step": np.int32(0)}
    with RunLog(tmp_path, 0, 4, tokens_per_step=8, tensorboard=False, quiet=False) as log:
        meter = Meter(Config(train=TrainConfig(steps=4)), log, 1e9, lost, WhenAskedFor)
        for step in range(1, 5):
            meter.add(step, metrics)
        meter.finish(stopping=True)
    assert capsys.readouterr().out.count("warning: energy is not counted any more (RuntimeError: GPU is lost)\n") == 1
    assert "energy_j_per_step" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_run_continues_without_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert energy_counter(jax.local_devices()) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert energy_counter(GPUS) is None

    class Old(Nvml):
        def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
            raise RuntimeError("Not Supported")

    monkeypatch.setitem(sys.modules, "pynvml", Old())
    assert energy_counter(GPUS) is None


def test_energy_of_pauses_is_no_step_s(tmp_path) -> None:
    used = 0.0
    config = Config(train=TrainConfig(steps=4))
    metrics = {"loss": np.float32(1), "grad_norm": np.float32(1), "bad_step": np.int32(0)}
    with RunLog(tmp_path, 0, 4, tokens_per_step=8, tensorboard=False, quiet=False) as log:
        meter = Meter(config, log, 1e9, lambda: used, WhenAskedFor)
        for step in range(1, 5):
            meter.add(step, metrics)
            used += 5
            if step == 2:
                with meter.paused():
                    used += 100
        meter.finish(stopping=True)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {record["step"]: record["energy_j_per_step"] for record in records} == {1: 5.0, 4: 5.0}
