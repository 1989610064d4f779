"""The loss of a node, with real processes: one is killed, and what it had in memory is gone."""

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from moe_jax.checkpoint.files import newest_checkpoint
from moe_jax.distributed.heartbeat import PROGRAMS
from tests.run.test_many_processes import children, launched
from tests.run.test_resume import losses_of, wait_until

# two devices of each process, each with experts of its own
SETTINGS = [
    "mesh.cpu_devices=4",
    "mesh.data=1",
    "mesh.expert=4",
    "optimizer.zero=1",
    "train.steps=24",
    "checkpoint.every=8",
]


def test_a_lost_node_costs_no_step_and_the_loss_of_all_copies_those_since_the_checkpoint(tmp_path, monkeypatch):
    """Losses are those of a run that nothing disturbed, bit for bit."""
    memory, undisturbed = tmp_path / "memory", tmp_path / "undisturbed"
    for folder in (memory, undisturbed):
        folder.mkdir()
    monkeypatch.setenv(PROGRAMS, str(tmp_path / "programs"))  # compiled once for both runs
    with launched(undisturbed, 2, *SETTINGS) as process:
        assert process.wait(timeout=300) == 0, (undisturbed / "output").read_text()
    safe = ["checkpoint.safety_copies_every=1", f"checkpoint.safety_copies_dir={memory}"]
    with launched(tmp_path, 2, *SETTINGS, *safe) as process:
        wait_until(lambda: 10 in losses_of(tmp_path), tmp_path, process, at_most_s=300)
        lose([1], memory, process)
        wait_until(lambda: "all start again" in output(tmp_path), tmp_path, process)
        reached = max(losses_of(tmp_path))
        wait_until(lambda: newest_checkpoint(tmp_path) == 16, tmp_path, process, at_most_s=300)
        lose([0, 1], memory, process)
        assert process.wait(timeout=300) == 0, output(tmp_path)
    assert f"resuming from step {reached}: from safety copies (owner 1's from process 0)\n" in output(tmp_path)
    assert "resuming from step 16: from the checkpoint, as there are no safety copies\n" in output(tmp_path)
    assert losses_of(tmp_path) == losses_of(undisturbed)
    assert list(memory.iterdir()) == []


def lose(ranks: list[int], memory: Path, launcher) -> None:
    """Kill processes, and remove what is in their memory."""
    found = {int(command.rsplit(maxsplit=1)[1]): pid for pid, command in children(launcher)}
    for rank in ranks:
        with suppress(ProcessLookupError):  # the launcher was faster
            os.kill(found[rank], signal.SIGKILL)
    for rank in ranks:
        shutil.rmtree(*memory.glob(f"*/node-{rank}"))


def output(folder: Path) -> str:
    return (folder / "output").read_text()
