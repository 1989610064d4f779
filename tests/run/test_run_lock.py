"""Two runs never train in one folder, and a run that follows a killed one never waits for nothing."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moe_jax.errors import ConfigError
from moe_jax.run import run_lock as folder_lock
from moe_jax.run.run_lock import LAUNCH, FolderLock, Holder

HOLDS = """
import sys, time
from pathlib import Path
from moe_jax.run.run_lock import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("here", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "ENDING_S", 0.3)
    monkeypatch.setattr(folder_lock, "_POLL_S", 0.01)


@pytest.fixture
def other(tmp_path: Path):
    """A process that holds the lock of `run`."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path / "run"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"here\n"
            yield process
        finally:
            process.kill()


def holder_of(run: Path) -> Holder:
    return Holder(**json.loads((run / "lock").read_text()))


def put(run: Path, **changes: object) -> Holder:
    """What a run has left that is not visible from here."""
    with FolderLock(run):
        holder = dataclasses.replace(holder_of(run), **changes)
    run.mkdir(exist_ok=True)
    (run / "lock").write_text(json.dumps(dataclasses.asdict(holder)))
    return holder


def test_the_second_run_is_refused_and_the_first_keeps_its_lock(other: subprocess.Popen, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError) as refused, FolderLock(run):
        pytest.fail("it has the lock")
    assert re.fullmatch(
        rf"log\.dir={run} is in use by process {other.pid} on host \S+ for \d+ s: wait for its end, or use another "
        "log.dir",
        str(refused.value),
    )
    assert holder_of(run).pid == other.pid


@pytest.mark.parametrize("supervised", [False, True])
def test_a_worker_waits_for_one_whose_launcher_was_killed_and_others_do_not(
    supervised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old worker is alive for longer than a process needs to end that was killed itself."""
    put(tmp_path / "run", pid=77)
    seen = iter([True] * 5)
    monkeypatch.setattr(folder_lock, "ENDING_S", -1)
    monkeypatch.setattr(folder_lock, "_is_alive", lambda holder: next(seen, False))
    monkeypatch.setattr(folder_lock, "is_supervised", lambda: supervised)
    if not supervised:
        with pytest.raises(ConfigError, match="is in use by process 77 "), FolderLock(tmp_path / "run"):
            pytest.fail("it has the lock")
        return
    with FolderLock(tmp_path / "run"):
        assert holder_of(tmp_path / "run").pid == os.getpid()
    output = capsys.readouterr().out.splitlines()
    assert len(output) == 2, "the waiting is reported once"
    assert output[0].endswith(": waiting at most 60 s for a sign of life")
    assert output[1].endswith(", which trained there, is gone: taken over")


def test_a_worker_does_not_wait_for_ever_for_one_that_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "run", pid=os.getppid(), started=folder_lock._start_time(os.getppid()))
    monkeypatch.setattr(folder_lock, "SILENCE_S", 0.1)
    monkeypatch.setattr(folder_lock, "is_supervised", lambda: True)
    with pytest.raises(ConfigError, match=f"is in use by process {os.getppid()} "), FolderLock(tmp_path / "run"):
        pytest.fail("it has the lock")


@pytest.mark.parametrize(
    ("signal_error", "has_proc", "is_alive"),
    [
        (None, True, False),  # it has ended since the signal
        (None, False, True),  # nothing but the signal tells: a system without /proc
        (PermissionError, True, True),  # another user's process, hidden by hidepid
        (PermissionError, False, True),
        (ProcessLookupError, True, False),
        (ProcessLookupError, False, False),
    ],
)
def test_a_holder_that_cannot_be_looked_up_counts_as_alive_unless_it_is_known_to_be_gone(
    signal_error: type[OSError] | None,
    has_proc: bool,
    is_alive: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder, exists = put(tmp_path / "run", pid=77), os.path.exists

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (77, 0), "asks, and kills no process"
        if signal_error:
            raise signal_error

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(folder_lock, "_stat", lambda pid: [])
    monkeypatch.setattr(os.path, "exists", lambda path: has_proc if str(path).startswith("/proc") else exists(path))
    assert folder_lock._is_alive(holder) == is_alive
    taken = contextlib.nullcontext() if not is_alive else pytest.raises(ConfigError, match="in use by process 77 ")
    with taken, FolderLock(tmp_path / "run"):
        assert holder_of(tmp_path / "run").pid == os.getpid()


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.ENOSPC, "No space left on device): free some space, or name another folder"),
        (errno.EROFS, "Read-only file system): name another folder"),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_line(
    number: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: FolderLock) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FolderLock, "_take", refuse)
    with pytest.raises(ConfigError) as refusal, FolderLock(tmp_path / "run"):
        pass
    assert str(refusal.value) == f"log.dir={tmp_path / 'run'} cannot be written ({problem}"


def test_a_lock_without_proc_is_taken_and_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(self: Path, *_: object, **__: object) -> str:
        raise FileNotFoundError(2, "No such file or directory", str(self))

    with monkeypatch.context() as system:
        system.setattr(Path, "read_text", absent)
        lock = FolderLock(tmp_path / "run")
    assert (lock._own.started, lock._own.kernel) == ("", lock._own.host)
    with lock:
        assert holder_of(tmp_path / "run") == lock._own
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_killed_run_is_followed_at_once(
    is_reaped: bool, other: subprocess.Popen, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while its parent has not asked how it ended, so that its number is still in use."""
    run = tmp_path / "run"
    other.kill()
    if is_reaped:
        other.wait()
    with FolderLock(run):
        assert holder_of(run).pid == os.getpid()
    assert re.fullmatch(
        rf"log\.dir={run}: process {other.pid} on host \S+, which trained there, is gone: taken over\n",
        capsys.readouterr().out,
    )
    assert not (run / "lock").exists()


def test_a_stopped_process_still_holds_it(other: subprocess.Popen, tmp_path: Path) -> None:
    other.send_signal(signal.SIGSTOP)
    with pytest.raises(ConfigError, match="in use"), FolderLock(tmp_path / "run"):
        pytest.fail("it has the lock")


def test_nothing_is_left_of_a_lock_and_what_it_made(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "runs" / "a"):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} "), FolderLock(tmp_path / "runs" / "a"):
            pytest.fail("one process trains twice there")
        assert (tmp_path / "runs" / "a" / "lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_another_process_has_now_is_no_run(tmp_path: Path) -> None:
    put(tmp_path / "run", started="1")
    with FolderLock(tmp_path / "run"):
        pass


@pytest.mark.parametrize("text", ["", "null", '{"pid": 1}', "[" * 50_000, "\0" * 100])
def test_a_damaged_lock_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(text)
    with FolderLock(tmp_path):
        assert holder_of(tmp_path).pid == os.getpid()


def test_a_silent_process_on_another_host_is_waited_for_and_then_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder_lock, "SILENCE_S", 0.2)
    run = tmp_path / "run"
    put(run, kernel="another one", host="there", pid=77)
    with FolderLock(run):
        assert holder_of(run).pid == os.getpid()
    assert capsys.readouterr().out == (
        f"log.dir={run} was in use by process 77 on host there: waiting at most 0.2 s for a sign of life\n"
        f"log.dir={run}: process 77 on host there, which trained there, is gone: taken over\n"
    )


def test_a_process_on_another_host_that_has_been_silent_for_long_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path / "run", kernel="another one")
    os.utime(tmp_path / "run" / "lock", (0, time.time() - 61))
    with FolderLock(tmp_path / "run"):
        assert "waiting" not in capsys.readouterr().out


def test_a_process_on_another_host_that_shows_life_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    holder = put(run, kernel="another one", host="there", pid=77)

    def beat(seconds: float) -> None:
        (run / "lock").write_text(json.dumps(dataclasses.asdict(holder) | {"beats": 1}))

    monkeypatch.setattr(time, "sleep", beat)
    with pytest.raises(ConfigError, match="is in use by process 77 on host there for"), FolderLock(run):
        pytest.fail("it has the lock")


def test_workers_of_one_launch_follow_each_other_from_host_to_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path / "run", kernel="another one", launch="a1")
    monkeypatch.setenv(LAUNCH, "a1")
    with FolderLock(tmp_path / "run"):
        assert "waiting" not in capsys.readouterr().out


def test_a_run_that_another_one_took_for_dead_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.01)
    with FolderLock(tmp_path) as lock:
        lock.check()
        other = dataclasses.replace(holder_of(tmp_path), pid=77, host="there")
        (tmp_path / "lock").write_text(json.dumps(dataclasses.asdict(other)))
        deadline = time.monotonic() + 60
        while lock._lost_to is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(
            ConfigError, match="was taken over by process 77 on host there, as this process gave no sign"
        ):
            lock.check()
    assert holder_of(tmp_path) == other, "which is not this one's to remove"


def test_a_lock_beats_and_comes_back_when_it_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.01)
    with FolderLock(tmp_path) as lock:
        (tmp_path / "lock").unlink()
        deadline, beats = time.monotonic() + 60, 0
        while beats < 2:
            assert time.monotonic() < deadline
            with contextlib.suppress(FileNotFoundError, ValueError):  # not there yet, or half written
                beats = holder_of(tmp_path).beats
            time.sleep(0.01)
        lock.check()


def test_a_heartbeat_at_the_end_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0)
    before = threading.active_count()
    for _ in range(100):
        with FolderLock(tmp_path / "run"):
            pass
        assert threading.active_count() == before
        assert not [*tmp_path.iterdir()]
