"""What a launcher starts."""

import queue

import pytest

from moe_jax.launch import start
from moe_jax.launch.start import WorkerShare
from tests.launch.test_rendezvous import launch_of


@pytest.mark.parametrize(
    ("processes", "environ", "devices"),
    [(2, {}, "1"), (1, {}, None), (1, {"JAX_LOCAL_DEVICE_IDS": "0,1"}, "0,1"), (2, {"JAX_LOCAL_DEVICE_IDS": "5"}, "5")],
)
def test_of_several_processes_each_has_one_gpu_and_of_one_all(
    processes: int, environ: dict[str, str], devices: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "Worker", lambda rank, command, environ, events: environ)
    share = WorkerShare(rank=3, place=3, processes=2 * processes, coordinator="10.0.0.1:8476", again=False)
    started = start.start(launch_of(8475, processes=processes), share, environ, queue.SimpleQueue())
    assert started.get("JAX_LOCAL_DEVICE_IDS") == devices
