"""Two and four real processes train exactly like one with the same devices, and stop and resume as one."""

import json
import os
import re
import signal
import subprocess

import numpy as np
import pytest

from moe_jax.checkpoint.files import newest_checkpoint
from moe_jax.run.loop import train
from tests.launched.two_hosts import Hosts
from tests.run.test_resume import config_in, lines_of, losses_of, started, wait_until
from tests.run.whole_runs import compiled_once

SETTINGS = [
    "model.num_layers=1",
    "model.moe.moe_layer_freq=1",
    "mesh.data=2",
    "mesh.expert=4",
    "train.batch_size=16",
    "model.moe.capacity_factor=1.25",
    "checkpoint.every=0",
    "train.eval_every=0",
]
STEPS = 100


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[int, float]:
    """Losses of this process, which has all 8 devices."""
    folder = tmp_path_factory.mktemp("one")
    train(config_in(folder, f"train.steps={STEPS}", *SETTINGS))
    return losses_of(folder)


def launched(folder, processes: int, *overrides: str):
    return started(folder, "moe_jax.launch", "--processes", str(processes), "--grace=60", *SETTINGS, *overrides)


def assert_equal(losses: dict[int, float], expected: dict[int, float]) -> None:
    assert losses.keys() == expected.keys()
    np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=1e-6)  # measured: 1.2e-7


def test_four_processes_choose_a_schedule_together_and_train_like_one_in_the_background(expected, tmp_path):
    """Collectives go over TCP and within a process."""
    settings = ["schedule.policy=auto", "schedule.microbatches=auto", "schedule.weight_grad=greedy"]
    settings += ["schedule.grad_reduce=block", "exchange.algorithm=background", "exchange.reduction=background"]
    with launched(tmp_path, 4, "train.steps=6", *settings) as process:
        assert process.wait(timeout=300) == 0, (tmp_path / "output").read_text()
    assert (tmp_path / "output").read_text().count(", planned for cpux8") == 1
    assert_equal(losses_of(tmp_path), {step: expected[step] for step in range(1, 7)})


def test_tensor_ranks_of_two_processes_train_like_those_of_one(tmp_path):
    tensor = [
        "mesh.data=1",
        "mesh.expert=1",
        "mesh.tensor=8",
        "model.num_attention_heads=8",
        "model.moe.intermediate_size=16",
    ]
    tensor += ["exchange.tensor_form=sharded", "train.steps=4"]
    (tmp_path / "one").mkdir()
    train(config_in(tmp_path / "one", *SETTINGS, *tensor))
    with launched(tmp_path, 2, *tensor) as process:
        assert process.wait(timeout=300) == 0, (tmp_path / "output").read_text()
    assert_equal(losses_of(tmp_path), losses_of(tmp_path / "one"))


def test_two_processes_whose_experts_move_are_stopped_by_sigterm_and_resume_as_one(expected, tmp_path):
    """Both decide the same, so that losses are those without migration. The launcher gets the signal, and one process
    resumes with the devices of both, and experts in their order.
    """
    moving = ["migration.enabled=true", "migration.every=2", "migration.threshold=1", "migration.patience=1"]
    with launched(tmp_path, 2, "train.steps=10000", *moving, "migration.payback_steps=null") as process:
        wait_until(lambda: moves_in(tmp_path) and len(losses_of(tmp_path)) >= 4, tmp_path, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0, (tmp_path / "output").read_text()
    saved = newest_checkpoint(tmp_path)
    assert saved == max(losses_of(tmp_path)) < STEPS
    output = (tmp_path / "output").read_text()
    assert output.endswith(f"stopped after step {saved}: the same command resumes from there\n")
    assert output.count("experts of MoE block 0 changed ranks") == len(moves_in(tmp_path))
    train(config_in(tmp_path, f"train.steps={STEPS}", *SETTINGS))
    assert_equal(losses_of(tmp_path), expected)


def moves_in(folder) -> list[dict]:
    """Records of experts that changed ranks."""
    return [record for record in map(json.loads, lines_of(folder, last=STEPS)) if "migrated_blocks" in record]


def test_a_host_that_is_lost_and_returns_changes_nothing(expected, tmp_path):
    """Two launchers; one is killed with its process, and started again. Steps are done twice, bit for bit."""
    config_in(tmp_path)
    training = ["--grace=60", "--config", str(tmp_path / "experiment.yaml"), f"log.dir={tmp_path}", *SETTINGS]
    training += ["train.steps=30", "checkpoint.every=10"]
    with Hosts(tmp_path, "moe_jax.train") as hosts:
        for host in (0, 1):
            hosts.start(host, *training)
        first = hosts.launchers[0]
        wait_until(lambda: newest_checkpoint(tmp_path) and 13 in losses_of(tmp_path), tmp_path, first)
        ((rank_1, _),) = children(hosts.launchers[1])
        hosts.launchers[1].kill()
        os.kill(rank_1, signal.SIGKILL)
        before = losses_of(tmp_path)
        hosts.start(1, *training)
        assert hosts.codes(seconds=300) == [0, 0], hosts.output(0)
        output = hosts.output(0)
    assert re.search(
        "^launch: rank 1 on host 1 failed first, .*: all start again in 0 s, try 1 of 3$", output, re.MULTILINE
    )
    assert re.search("^resuming from step [12]0$", output, re.MULTILINE)
    losses = losses_of(tmp_path)
    assert before == {step: losses[step] for step in before}
    assert_equal(losses, {step: expected[step] for step in range(1, 31)})


def children(process: subprocess.Popen) -> list[tuple[int, str]]:
    """Process ids and command lines."""
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(process.pid)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [(int(pid), command) for pid, command in (line.split(maxsplit=1) for line in lines)]
