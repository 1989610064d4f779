"""Lines of output that find no room on the disk end no run."""

import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from moe_jax.cli import train as command
from moe_jax.environment import lose_output_on_full_disk
from moe_jax.errors import ConfigError
from moe_jax.launch.worker import Worker


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str | int], None]]:
    """Puts a file in the place of a stream of this process, until the test ends."""
    opened: list[IO[str]] = []

    def replace(name: str, file: str | int) -> None:
        opened.append(open(file, "w", encoding="utf-8"))  # noqa: SIM115 – closed below
        for each in (name, f"__{name}__"):
            monkeypatch.setattr(sys, each, opened[-1])

    yield replace
    monkeypatch.undo()
    for stream in opened:
        with suppress(OSError):  # what it still has finds no room
            stream.close()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_output_on_a_full_disk_is_lost(name: str, replaced: Callable[[str, str | int], None]) -> None:
    replaced(name, "/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        print("step 1", file=getattr(sys, name), flush=True)
    lose_output_on_full_disk()
    for _ in range(1000):
        print("step 2" * 100, file=getattr(sys, name), flush=True)
    getattr(sys, name).flush()


def test_output_has_all_that_fits(tmp_path: Path, replaced: Callable[[str, str | int], None]) -> None:
    """Other errors are raised, such as that of a pipe without a reader; streams of a notebook stay."""
    before = sys.stdout
    lose_output_on_full_disk()
    assert sys.stdout is before, "that of pytest"
    read, write = os.pipe()
    for place in (str(tmp_path / "log"), write):
        replaced("stdout", place)
        print("before")
        lose_output_on_full_disk()
        print("after: é", flush=True)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "before\nafter: é\n"
    assert os.read(read, 100).decode() == "before\nafter: é\n"
    os.close(read)
    with pytest.raises(BrokenPipeError):
        print("nobody reads", flush=True)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, write)
    os.close(null)


def test_the_command_that_trains_loses_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not the output of a dry run, which is all that it makes."""
    lost: list[bool] = []
    monkeypatch.setattr(command, "lose_output_on_full_disk", lambda: lost.append(True))
    for options in ([], ["--dry-run"]):
        monkeypatch.setattr(sys, "argv", ["train", "--config", f"{tmp_path}/missing.yaml", *options])
        with pytest.raises(ConfigError):
            command.main()
    assert lost == [True]


def test_the_pipe_of_a_process_is_read_though_the_launcher_cannot_print(
    replaced: Callable[[str, str | int], None],
) -> None:
    """Else the process would wait in its next line for ever."""
    replaced("stderr", "/dev/full")
    events: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    program = "import sys; sys.stderr.write('line\\n' * 100_000)"
    worker = Worker(1, [sys.executable, "-c", program], dict(os.environ), events)
    try:
        assert events.get(timeout=20) == (1, 0)
    finally:
        worker.send(signal.SIGKILL)
        worker.finish(print_errors=False)
        worker._process.stderr.close()
