"""Processes that assemble before jax joins them: for whom they wait, and that strangers keep no process out."""

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_jax.distributed import startup_barrier as roll_call
from moe_jax.distributed.heartbeat import PIPE
from moe_jax.distributed.startup_barrier import AbsentError, ProcessError, StartupBarrier, wait_for_all
from moe_jax.launch.supervisor import reserved_port

ROOT = Path(__file__).parents[2]
STRANGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"process": "1", "of": 3}\n',
    b"\xff\n",
    b"[" * 5000 + b"\n",
    b"7\n",
]


def meeting(port: int, process: int, **changes) -> StartupBarrier:
    address = f"127.0.0.1:{port}"
    facts = {"address": address, "bind": address, "num_processes": 3, "process_id": process, "timeout_s": 20}
    return StartupBarrier(**(facts | changes))


def in_background(task: Callable[[], None]) -> tuple[threading.Thread, list[Exception]]:
    """A thread, and what it raises."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            task()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def called(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except ConnectionRefusedError:  # process 0 does not listen yet
            pass


def ended(commands: Sequence[Sequence[str]]) -> tuple[list[int], list[str]]:
    """Exit codes and what they wrote to stderr, of commands that run at the same time in the project's root."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
            for command in commands
        ]
        for process in started:
            stack.callback(process.kill)
        errors = [process.communicate(timeout=300)[1] for process in started]
    return [process.returncode for process in started], errors


def test_all_leave_together_whoever_else_calls() -> None:
    """Two strangers stay, one of them silent and one in the middle of a line; process 1 leaves and comes again."""
    with reserved_port() as port:
        first, problems = in_background(lambda: wait_for_all(meeting(port, 0)))
        for output in STRANGE:
            with called(port) as stranger:
                stranger.sendall(output)
        with called(port), called(port) as slow:
            slow.sendall(b'{"process": 1')
            with called(port) as died:
                died.sendall(b'{"process": 1, "of": 3}\n')
            others = [
                in_background(lambda process=process: roll_call._call(meeting(port, process))) for process in (1, 2)
            ]
            for thread, raised in [(first, problems), *others]:
                thread.join(timeout=120)
                assert not thread.is_alive()
                assert not raised
        with socket.create_server(("127.0.0.1", port)):
            roll_call._await_service(meeting(port, 1))


def test_who_is_missing_is_reported_and_then_an_error_of_all_who_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roll_call, "QUIET_S", 0)
    with reserved_port() as port:
        other, problems = in_background(lambda: wait_for_all(meeting(port, 2)))
        with pytest.raises(AbsentError) as refusal:
            wait_for_all(meeting(port, 0, timeout_s=1.5))
        other.join(timeout=120)
    output = capsys.readouterr().err.splitlines()
    where = f"127.0.0.1:{port}"
    assert len(output) == 2
    for line in output:
        assert re.fullmatch(
            rf"waiting for process(es 1, 2| 1) at {where} \([12] of 3 processes are here\), at most 1.5 s"
            rf"|process 2 waits for (process 0|the others) at {where}( \(Connection refused\))?, at most 20 s",
            line,
        )
    assert str(refusal.value) == (
        f"--coordinator={where}: process 1 did not come within 1.5 s (2 of 3 processes are here): "
        "start it with the same --coordinator and --num-processes, or set --join-timeout higher"
    )
    assert [str(problem) for problem in problems] == [str(refusal.value)]
    assert refusal.value.exit_code == 2
    monkeypatch.setenv(PIPE, "9")
    assert refusal.value.exit_code == 75, "the launcher starts all again"


@pytest.mark.parametrize(
    ("process", "of", "reported"),
    [
        (1, 2, "process 0 has --num-processes=3, and process 1 has 2"),
        (2, 3, "there is a process with --process-id=2 already"),
    ],
)
def test_a_process_that_does_not_fit_is_refused(process: int, of: int, reported: str) -> None:
    with reserved_port() as port:
        first, problems = in_background(lambda: wait_for_all(meeting(port, 0, timeout_s=5)))
        with called(port) as second:
            second.sendall(json.dumps({"process": 2, "of": 3}).encode() + b"\n")
            with pytest.raises(ProcessError, match=reported):
                roll_call._call(meeting(port, process, num_processes=of))
            with called(port) as third:
                third.sendall(b'{"process": 1, "of": 3}\n')
                first.join(timeout=120)
    assert not problems


def test_trainings_whose_peers_do_not_come_say_so_and_end_with_exit_code_2(tmp_path: Path) -> None:
    """As typed: processes 0 and 2 of three."""
    with reserved_port() as port:
        flags = [
            "--coordinator",
            f"127.0.0.1:{port}",
            "--num-processes=3",
            "--join-timeout=4",
            f"log.dir={tmp_path / 'run'}",
        ]
        command = [sys.executable, "-m", "moe_jax.train", "--config", "configs/shakespeare_cpu.yaml", *flags]
        started = [[*command, f"--process-id={i}"] for i in (0, 2)]
        codes, errors = ended(started)
    assert codes == [2, 2], errors
    (waits, reported), (*others_wait, others_told) = (error.splitlines() for error in errors)
    assert re.fullmatch(
        r"waiting for process.* at 127\.0\.0\.1:\d+ \([12] of 3 processes are here\), at most 4 s", waits
    )
    assert all(line.startswith("process 2 waits for ") for line in others_wait), (
        "it may be late, and get the error at once"
    )
    for line in (reported, others_told):
        assert line.startswith("error: --coordinator=127.0.0.1:")
    assert not (tmp_path / "run").exists()
