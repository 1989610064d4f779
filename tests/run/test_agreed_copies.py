"""The record of safety copies is that of process 0 on all nodes, though their own settings differ."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_jax.checkpoint.record import Record
from moe_jax.run import replicator, restore_from_replicas
from moe_jax.run.replicator import Replicator

VERSIONS = {"jax": "0.10.2"}


class Files:
    """Takes the place of a node's files, and keeps what would be written."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, Record]] = []

    def begin(self) -> None: ...

    def swap(self) -> None: ...

    def end(self, run: int, record: Record, is_recorded: bool) -> None:
        self.ended.append((run, record))


def test_all_nodes_write_one_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent: list[str] = []
    rank, files = 0, [Files(), Files()]

    def from_process(source: int, value: Any) -> Any:
        """Process 0 calls it first; the other one receives the same values in the same order."""
        assert source == 0
        if rank == 0:
            sent.append(json.dumps(value))
            return value
        return json.loads(sent.pop(0))

    def facts(run: Any) -> dict[str, Any]:
        return {"config": {"log.dir": f"disk-{rank}"}, "mesh": {"expert": 2}, "versions": VERSIONS, "run": f"id-{rank}"}

    monkeypatch.setattr(replicator, "from_process", from_process)
    monkeypatch.setattr(replicator, "allgather", lambda own: [41, own] if own > 1 else [own, own])
    monkeypatch.setattr(replicator, "record_facts", facts)
    monkeypatch.setattr(replicator, "_reserved", lambda *_: files[rank])
    monkeypatch.setattr(replicator, "_programs", lambda *_: {})
    monkeypatch.setattr(replicator, "agreed_digests", lambda digests, step, state: np.zeros((1, 2), np.uint32))
    checkpoint = SimpleNamespace(safety_copies_every=1, safety_copies_dir=str(tmp_path))
    run: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=checkpoint, train=SimpleNamespace(steps=9)),
        safety=SimpleNamespace(layout=SimpleNamespace(groups=())),
        first_step=0,
        trainer=SimpleNamespace(state_shapes={}),
        choices="some",
    )
    for rank in range(2):
        own = Replicator(run, None)
        own._digests = SimpleNamespace(result=lambda: lambda state: None)  # type: ignore[assignment]
        own._log = SimpleNamespace(write=lambda record: None)  # type: ignore[assignment]
        state = {"w": np.zeros(1, np.float32)}
        own.replicate(3, state, is_recorded=False, data={}, tuner={"search": rank}, recent_losses=())
    assert not sent
    ((run_0, record_0),), ((run_1, record_1),) = (each.ended for each in files)
    assert run_0 == run_1 == 41, "the run's number, too"
    assert record_0.to_json() == record_1.to_json(), "its checksum tells versions of a step apart"
    assert (record_1.config, record_1.run, record_1.tuner) == ({"log.dir": "disk-0"}, "id-0", {"search": 0})


def test_copies_are_those_of_the_run_that_process_0_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another process may see an older file of a shared disk, or none."""
    monkeypatch.setattr(restore_from_replicas, "allgather", lambda own: [41, own])
    assert restore_from_replicas._read_run_id(tmp_path) == 41
    (tmp_path / "run_id").write_text("7\n")
    assert restore_from_replicas._read_run_id(tmp_path) == 41
