"""The launcher on real processes: what they compute together, and how they end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "moe_jax.launch", *arguments]
    root = Path(__file__).parents[2]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under `nohup` ignore it, and so would the launcher
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        try:
            yield process
        finally:
            process.terminate()


def run(*arguments: str) -> tuple[int, str, str]:
    with started(*arguments) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def act(role: str, *arguments: str, retries: int = 0) -> list[str]:
    return ["--processes", "2", "--module", "tests.launched.script", f"--retries={retries}", *arguments, role]


def wait_for_ids(process: subprocess.Popen[str], count: int) -> list[int]:
    """IDs of all processes that the ranks report, one line each."""
    assert process.stderr is not None
    return [int(text) for _ in range(count) for text in process.stderr.readline().split("runs as")[1].split()]


def alive(process_id: int) -> bool:
    state = subprocess.run(["ps", "-o", "state=", "-p", str(process_id)], capture_output=True, text=True).stdout.strip()
    return state not in ("", "Z")


def assert_all_end(process_ids: Sequence[int]) -> None:
    deadline = time.monotonic() + 60  # a kill takes effect when the scheduler comes round
    while any(alive(i) for i in process_ids):
        assert time.monotonic() < deadline, "the launcher left processes behind"
        time.sleep(0.05)


@pytest.mark.parametrize("processes", [2, 4])
def test_devices_of_all_processes_sum_and_exchange_as_one(processes: int) -> None:
    code, out, err = run("--processes", str(processes), "--module", "tests.launched.collectives", "--cpu-devices", "4")
    assert code == 0, err
    assert f"{processes} processes with {4 // processes} devices each\n" in out


@pytest.mark.parametrize(
    ("how", "code", "reported"), [("bug", 1, "ValueError: a bug"), ("bad-input", 2, "error: data.path=x is missing")]
)
def test_a_lone_failure_ends_all_within_seconds_and_is_named(how: str, code: int, reported: str) -> None:
    began = time.monotonic()
    actual, _, err = run("--processes", "2", "--module", "tests.launched.failure", "--grace=20", "--retries=0", how)
    assert actual == code, err
    assert f"[rank 1] {reported}\n" in err
    assert err.endswith(f"launch: rank 1 failed first, with exit code {code}\n")
    assert time.monotonic() - began < 50


def test_a_failure_of_all_after_they_have_joined_is_reported_once() -> None:
    code, _, err = run("--processes", "2", "--module", "tests.launched.failure", "bad-input-of-all")
    assert (code, err) == (2, "error: data.path=x is missing\n")


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_unknown_arguments_reach_every_process_and_rank_0_is_unprefixed(separator: Sequence[str]) -> None:
    command = ["--config", "a b.yaml", "mesh.cpu_devices=8", "--dry-run"]
    code, out, err = run(*act("arguments", "--port", "4242", *separator), *command)
    assert code == 0
    assert out == (
        "--config a b.yaml mesh.cpu_devices=8 --dry-run --coordinator 127.0.0.1:4242 --num-processes 2 --process-id 0\n"
    )
    assert sorted(err.splitlines()) == ["[rank 1] a line for stderr", "a line for stderr"]


def test_bad_input_of_every_process_is_reported_once() -> None:
    code, _, err = run(*act("bad-input"))
    assert (code, err) == (2, "error: train.steps=0 must be at least 1\n")


@pytest.mark.parametrize(
    ("role", "code", "how"), [("one-fails", 7, "with exit code 7"), ("one-crashes", 137, "killed by SIGKILL")]
)
def test_a_failure_stops_the_others(role: str, code: int, how: str) -> None:
    began = time.monotonic()
    actual, _, err = run(*act(role, "--grace", "0.2"))
    assert (actual, err) == (code, f"launch: rank 1 failed first, {how}\n")
    assert time.monotonic() - began < 50


def test_a_signal_that_one_cannot_handle_yet_ends_all() -> None:
    began = time.monotonic()
    code, _, err = run(*act("one-is-asked-to-end", "--grace=60", retries=3))
    assert (code, err) == (128 + signal.SIGTERM, "launch: stopped by SIGTERM\n")
    assert time.monotonic() - began < 50


def test_a_signal_to_a_training_that_starts_ends_all_well_and_at_once(tmp_path: Path) -> None:
    training = ["--config", "configs/shakespeare_cpu.yaml", "mesh.cpu_devices=2", f"log.dir={tmp_path / 'run'}"]
    with started("--processes=2", "--grace=60", *training) as process:
        workers: list[str] = []
        while len(workers) < 2:
            listed = ["ps", "-o", "pid=", "--ppid", str(process.pid)]
            workers = subprocess.run(listed, capture_output=True, text=True).stdout.split()
        os.kill(int(workers[1]), signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (
        0,
        "launch: stopped by SIGTERM before a new step: the same command resumes the run\n",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_every_process_save_and_end_well(number: signal.Signals) -> None:
    with started(*act("saves-on-sigterm")) as process:
        ids = wait_for_ids(process, 2)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert sorted(err.splitlines()) == ["[rank 1] rank 1 saved", "rank 0 saved"]
    assert_all_end(ids)


def test_a_signal_leaves_nothing_behind_not_even_what_ignores_it() -> None:
    with started(*act("ignores-sigterm", "--grace", "0.3")) as process:
        ids = wait_for_ids(process, 2)
        assert len(ids) == 4
        assert all(alive(i) for i in ids)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert err == "launch: stopped by SIGTERM\n"
    assert_all_end(ids)


def test_a_second_signal_ends_all_at_once() -> None:
    with started(*act("ignores-sigterm", "--grace=60")) as process:
        ids = wait_for_ids(process, 2)
        process.send_signal(signal.SIGTERM)
        time.sleep(1.5)  # sooner, it would be the same request
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert_all_end(ids)


FAILED = "launch: rank 1 failed first, with exit code 7"


def test_all_start_again_until_they_get_no_further(tmp_path: Path) -> None:
    """Three times step 5: the second and the third are tries without a new step."""
    code, _, err = run(*act("trains", retries=2), str(tmp_path / "starts"), "5", "5", "5")
    assert (code, err.splitlines()) == (
        7,
        [
            f"{FAILED}: all start again in 0 s, try 1 of 2",
            f"{FAILED}: all start again in 1 s, try 2 of 2",
            f"{FAILED}; gave up after 2 more tries",
        ],
    )


def test_a_new_step_makes_tries_count_again(tmp_path: Path) -> None:
    code, _, err = run(*act("trains", retries=1), str(tmp_path / "starts"), "2", "3", "4")
    assert (code, err.splitlines()) == (0, [f"{FAILED}: all start again in 0 s, try 1 of 1"] * 3)


@pytest.mark.parametrize(("how", "why"), [("silently", "no step after 3 for 4 s"), ("stopped", "stopped for 4 s")])
def test_a_hang_is_noticed_and_all_start_again(how: str, why: str, tmp_path: Path) -> None:
    with started(*act("hangs", "--progress-timeout=4", retries=1), str(tmp_path / "starts"), how) as process:
        (hanging,) = wait_for_ids(process, 1)
        if how == "stopped":
            os.kill(hanging, signal.SIGSTOP)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert err == f"launch: rank 1 hangs ({why}): all start again in 0 s, try 1 of 1\n"
    assert_all_end([hanging])


def test_what_goes_back_has_as_long_as_what_starts() -> None:
    """It compiles its programs again."""
    code, _, err = run(*act("goes-back", "--progress-timeout=1", "--start-timeout=30"))
    assert (code, err) == (0, "")


def test_the_others_continue_without_one_that_fails_at_every_start() -> None:
    """Three can form no mesh, so it is two of four."""
    flags = ["--processes", "4", "--min-processes", "2", "--retries", "1", "--module", "tests.launched.script"]
    code, _, err = run(*flags, "has-a-broken-place")
    assert code == 0, err
    assert [line for line in err.splitlines() if line.startswith("launch:")] == [
        f"{FAILED}: all start again in 0 s, try 1 of 1",
        f"{FAILED}: 3 of 4 processes continue",
        "launch: no mesh of 3 processes: 2 of 4 processes continue",
    ]
    assert err.count("error: nothing trains on cpux3\n") == 1
    assert err.count("[rank 1] rank 1 in place 2\n") == 2


def test_another_mistake_of_those_that_continue_is_reported_as_it_is() -> None:
    flags = ["--processes", "2", "--min-processes", "1", "--retries", "0", "--module", "tests.launched.script"]
    code, _, err = run(*flags, "is-wrong-without-one")
    reported = [f"{FAILED}: 1 of 2 processes continue", "error: data.path=x is missing"]
    assert (code, err.splitlines()) == (2, ["[rank 1] error: data.path=x is missing", *reported])


def test_all_are_tried_again_after_a_failure_after_a_new_step(tmp_path: Path) -> None:
    flags = ["--processes", "2", "--min-processes", "1", "--retries", "1", "--module", "tests.launched.script"]
    code, _, err = run(*flags, "is-broken-for-a-while", str(tmp_path / "mended"))
    assert (code, err.splitlines()) == (
        0,
        [
            f"{FAILED}: all start again in 0 s, try 1 of 1",
            f"{FAILED}: 1 of 2 processes continue",
            "launch: rank 0 failed first, with exit code 8: all start again in 0 s, try 1 of 1",
        ],
    )


def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    with started(*act("hangs"), str(tmp_path / "starts"), "not at all") as process:
        ids = wait_for_ids(process, 1)
        process.kill()
        process.wait(timeout=120)
        assert_all_end(ids)


@pytest.mark.parametrize("arguments", [["--processes", "0"], ["--processes", "2", "--port", "70000"]])
def test_bad_flags_are_one_line(arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: --\w+=\d+ must be [^\n]+\n", err)
