"""How processes end that another one drags along."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

from moe_jax.distributed.failures import is_peer_error
from moe_jax.distributed.heartbeat import SAME_SIGNAL_S
from moe_jax.errors import EXIT_TRY_AGAIN, ConfigError
from moe_jax.launch.supervisor import reserved_port


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:4242"),
            True,
        ),
        (ValueError("UNKNOWN: Gloo AllReduce failed: Read error [127.0.0.1]:4242: Connection reset by peer"), True),
        (jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out. Id: sync:0"), True),
        (ConnectionError("process 1 is gone"), True),
        (BrokenPipeError(32, "Broken pipe"), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4242 bytes"), False),
        (ValueError("cannot reshape array"), False),
        (ConfigError("data.path=connection is missing"), False),
    ],
)
def test_errors_that_come_of_a_peer_are_distinguished_from_others(error: Exception, expected: bool) -> None:
    assert is_peer_error(error) == expected


@contextmanager
def two(how: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes without a launcher, as on a cluster."""
    with reserved_port() as port:
        meeting = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id"]
        command = [sys.executable, "-m", "tests.launched.failure", how, *meeting]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen([*command, "0"], **pipes) as first, subprocess.Popen([*command, "1"], **pipes) as second:
            try:
                yield [first, second]
            finally:
                for process in (first, second):
                    process.kill()


def test_a_process_whose_peer_was_killed_reports_it_and_asks_to_be_tried_again() -> None:
    """It waits in a collective."""
    with two("killed") as (first, second):
        second.wait(timeout=60)
        _, err = first.communicate(timeout=120)
    assert first.returncode == EXIT_TRY_AGAIN, err
    reported = [line for line in err.splitlines() if line.startswith("PEER-FAILURE")]
    assert len(reported) == 1
    assert re.fullmatch(r"PEER-FAILURE rank=0 step=0 cause=.+", reported[0])


def test_a_second_sigterm_ends_a_process_even_in_a_collective() -> None:
    with two("waits") as (first, _):
        assert first.stdout is not None
        assert "waits\n" in iter(first.stdout.readline, ""), "not before gloo has reported what it does"
        time.sleep(0.5)
        first.send_signal(signal.SIGTERM)
        time.sleep(SAME_SIGNAL_S + 0.5)
        assert first.poll() is None, "the first asks for the end of the run"
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=60) == -signal.SIGTERM


def test_a_sigterm_to_one_process_before_its_first_step_ends_all_well() -> None:
    with two("signalled") as (first, second):
        assert (first.wait(timeout=60), second.wait(timeout=60)) == (0, 0)


HELD = """
import threading
from moe_jax.errors import ConfigError
from moe_jax.distributed.failures import run_and_exit

def main():
    threading.Thread(target=threading.Event().wait).start()  # as orbax leaves behind
    {}

run_and_exit(main)
"""


@pytest.mark.parametrize(
    ("ending", "code", "output"),
    [
        ('raise ConfigError("log.dir=x is wrong")', 2, "error: log.dir=x is wrong\n"),
        (
            'raise NotADirectoryError(20, "Not a directory", "x/y")',
            2,
            "error: x/y: Not a directory: name another file or folder\n",
        ),
        ('raise RuntimeError("bug")', 1, "RuntimeError: bug\n"),
        ("raise KeyboardInterrupt", 130, "stopped: interrupted\n"),
        ("pass", 0, ""),
    ],
)
def test_no_thread_of_a_library_keeps_a_process_that_has_ended(ending: str, code: int, output: str) -> None:
    ended = subprocess.run([sys.executable, "-c", HELD.format(ending)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == code
    assert ended.stderr.endswith(output)
    assert ended.stderr == output or code == 1
