"""Two launchers on one machine that take it for two hosts: what one of them suffers, both overcome."""

import argparse
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_jax.launch.channel import SILENCE_S
from moe_jax.launch.hosts import add_arguments, hosts_from
from moe_jax.launch.start import TOKEN, LaunchError
from tests.launch.test_launch import assert_all_end
from tests.launched.two_hosts import Hosts

RUNS = "rank {} runs as "


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as hosts:
        yield hosts


def test_a_failure_on_one_host_starts_all_again_at_once(hosts: Hosts) -> None:
    """Rank 1 is on host 1; it is killed, and then asked to end."""
    hosts.start_both("saves-on-sigterm")
    for host in (0, 1):
        hosts.wait_for(host, RUNS.format(host))
    os.kill(hosts.ids(1)[0], signal.SIGKILL)
    began = time.monotonic()
    hosts.wait_for(0, "start again")
    assert time.monotonic() - began < SILENCE_S, "not only when nothing was heard for long"
    for host in (0, 1):
        hosts.wait_for(host, RUNS.format(host), times=2)
    assert_all_end([hosts.ids(host)[0] for host in (0, 1)])
    hosts.launchers[1].terminate()
    assert hosts.codes() == [0, 0]
    assert "rank 0 saved\n" in hosts.output(0)
    assert "[rank 1] rank 1 saved\n" in hosts.output(1)
    assert hosts.launcher_said(0)[-1] == (
        "rank 1 on host 1 failed first, killed by SIGKILL: all start again in 0 s, try 1 of 3"
    )


def test_a_hang_on_another_host_is_reported_to_host_0(hosts: Hosts) -> None:
    hosts.start_both("--progress-timeout=4", "hangs", str(hosts.log(2)), "silently")
    assert hosts.codes() == [0, 0]
    assert hosts.launcher_said(0)[1:] == [
        "rank 1 on host 1 hangs (no step after 3 for 4 s): all start again in 0 s, try 1 of 3"
    ]


def test_a_lost_host_is_waited_for_and_its_return_starts_all_again(hosts: Hosts) -> None:
    """Its launcher is killed, and the processes that it leaves behind end by themselves."""
    role = ["hangs", str(hosts.log(2)), "not at all"]
    hosts.start_both(*role)
    hosts.wait_for(1, RUNS.format(1))
    hosts.launchers[1].kill()
    hosts.wait_for(0, "waits for host 1, at most 600 s", times=2)
    assert_all_end(hosts.ids(1))
    hosts.start(1, *role)
    assert hosts.codes() == [0, 0]
    assert "rank 1 on host 1 failed first, lost with its host: all start again in 0 s, try 1 of 3" in (
        hosts.launcher_said(0)
    )


def test_the_others_continue_without_a_lost_host_and_take_it_in_again(hosts: Hosts) -> None:
    flags = ["--min-hosts=1", "--host-timeout=2", "saves-on-sigterm"]
    hosts.start_both(*flags)
    for host in (0, 1):
        hosts.wait_for(host, RUNS.format(host))
    hosts.launchers[1].kill()
    os.kill(hosts.ids(1)[0], signal.SIGKILL)
    hosts.wait_for(0, RUNS.format(0), times=2)
    hosts.start(1, *flags)
    hosts.wait_for(1, RUNS.format(1))
    hosts.wait_for(0, RUNS.format(0), times=3)
    hosts.launchers[0].terminate()
    assert hosts.codes() == [0, 0]
    assert hosts.launcher_said(0)[1:] == [
        "rank 1 on host 1 failed first, lost with its host: all start again in 0 s, try 1 of 3",
        f"at {hosts.address}, waits for host 1, at most 2 s",
        "1 of 2 hosts continue",
        "host 1 has come: all start again",
        "2 of 2 hosts continue",
    ]
    assert hosts.output(0).count("rank 0 saved\n") == 2, "once for the host that came"


def test_the_others_end_their_processes_when_host_0_is_lost_and_follow_it_when_it_returns(hosts: Hosts) -> None:
    hosts.start_both("ignores-sigterm")
    for host in (0, 1):
        hosts.wait_for(host, RUNS.format(host))
    hosts.launchers[0].kill()
    assert_all_end(hosts.ids(1))
    os.killpg(hosts.ids(0)[0], signal.SIGKILL)
    hosts.start(0, "ignores-sigterm")
    for host, times in ((0, 1), (1, 2)):
        hosts.wait_for(host, RUNS.format(host), times)
    for _ in range(2):
        hosts.launchers[0].terminate()
        time.sleep(1.5)
    assert hosts.codes() == [143, 143]
    reported = hosts.launcher_said(1)
    lost = reported.index("host 0 is lost: its return is waited for, at most 600 s")
    assert reported[lost + 1] == "host 1 has joined"
    assert_all_end([*hosts.ids(0), *hosts.ids(1)])


def test_bad_input_of_every_host_is_reported_once_and_another_command_is_refused(hosts: Hosts) -> None:
    hosts.start(0, "bad-input")
    hosts.wait_for(0, "waits for host 1")
    hosts.start(1, "bad-input", "of-another-kind")
    assert hosts.launchers[1].wait(timeout=120) == 2
    assert hosts.output(1) == (
        f"error: --rendezvous={hosts.address} refuses host 1 (it was started with another command): "
        f"give all hosts the same command, with a --host of their own, and the same {TOKEN}\n"
    )
    hosts.start(1, "bad-input")
    assert hosts.codes() == [2, 2]
    assert hosts.launcher_said(0) == [f"at {hosts.address}, waits for host 1, at most 600 s"]
    assert [hosts.output(host).count("error: ") for host in (0, 1)] == [1, 0]


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_stays_alone_gives_up_in_time(host: int, hosts: Hosts) -> None:
    hosts.start(host, "--host-timeout=0.5", "arguments")
    assert hosts.launchers[host].wait(timeout=120) == 75
    output = (
        "1 of 2 hosts came, and --min-hosts=2: gave up",
        f"host 0 does not take host 1 in at {hosts.address} (Connection refused): gave up",
    )
    waits = (
        f"at {hosts.address}, waits for host 1, at most 0.5 s",
        f"host 0 does not answer at {hosts.address} (Connection refused): it is called for 0.5 s",
    )
    assert hosts.launcher_said(host) == [waits[host], output[host]]


@pytest.mark.parametrize(
    ("slurm", "expected"),
    [
        ({}, (1, 0)),
        ({"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}, (2, 1)),
        ({"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}, (1, 0)),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, (1, 0)),  # sbatch's own shell
    ],
)
def test_slurm_determines_which_hosts_there_are(slurm: dict[str, str], expected: tuple[int, int]) -> None:
    found = hosts_from(parse("--rendezvous=n0:8475"), {TOKEN: "a secret of the tests", **slurm})
    assert (found["hosts"], found["host"]) == expected
    assert hosts_from(parse("--hosts=1"), slurm)["hosts"] == 1, "the command line wins"


def test_several_launchers_on_a_slurm_node_are_refused() -> None:
    slurm = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "16", "SLURM_NODEID": "1"}
    with pytest.raises(LaunchError) as refusal:
        hosts_from(parse(), slurm)
    assert str(refusal.value) == (
        "srun started 16 tasks on 2 nodes: start one launcher on each, with srun --ntasks-per-node=1, and --processes "
        "for those of a node"
    )


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--host-timeout=1", *flags], argparse.Namespace(port=None))
