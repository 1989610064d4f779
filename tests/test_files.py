"""Files are written whole or not at all, and a question whether they can be leaves nothing behind."""

import errno
import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_jax.files.atomic import (
    AppendOnlyFile,
    all_or_nothing,
    check_writable,
    reason,
    write_folder_atomically,
    write_together,
)
from tests.bad_input.cases import tree


def test_several_files_replace_what_was_there_and_leave_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "a.part").write_text("of a process that died")
    write_together({tmp_path / "a": b"new", tmp_path / "in" / "there" / "b": b"too"})
    assert tree(tmp_path) == {"a": b"new", "in": None, "in/there": None, "in/there/b": b"too"}


def test_where_one_file_cannot_be_written_none_is(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "b.part").mkdir()
    before = tree(tmp_path)
    with pytest.raises(IsADirectoryError):
        write_together({tmp_path / "a": b"new", tmp_path / "in" / "c": b"new", tmp_path / "b": b"new"})
    assert tree(tmp_path) == before


def test_processes_that_write_a_shared_file_at_once_write_it_whole(tmp_path: Path) -> None:
    """With one temporary name, the second would cut what the first has written, and one find its file gone."""
    path, whole = tmp_path / "cache", {text: text.encode() * 1000 for text in ("one", "two")}

    def pieces() -> Iterator[bytes]:
        yield whole["one"][:1500]
        write_together({path: whole["two"]}, is_shared=True)
        check_writable(path)
        assert path.read_bytes() == whole["two"]
        yield whole["one"][1500:]

    write_together({path: pieces()}, is_shared=True)
    assert tree(tmp_path) == {"cache": whole["one"]}


@pytest.mark.parametrize("name", ["cache", "cache.part", "cache.0a1b2c3d.part"])
def test_an_error_names_the_file_and_not_its_temporary_one(name: str) -> None:
    assert reason(OSError(errno.EACCES, "Permission denied", f"in/{name}")) == "in/cache: Permission denied"


def test_a_folder_is_written_whole(tmp_path: Path) -> None:
    with write_folder_atomically(tmp_path / "in" / "there") as folder:
        (folder / "file").write_text("new")
        assert list(tree(tmp_path)) != ["in", "in/there"]
    assert tree(tmp_path) == {"in": None, "in/there": None, "in/there/file": b"new"}


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, OSError])
def test_a_folder_whose_content_was_interrupted_is_not_there(end: type[BaseException], tmp_path: Path) -> None:
    """By SIGTERM, too, which ends other programs without a word."""

    def write() -> None:
        with write_folder_atomically(tmp_path / "in" / "there") as folder:
            (folder / "file").write_text("new")
            if end is SystemExit:
                os.kill(os.getpid(), signal.SIGTERM)
            elif end is OSError:
                (folder / "no" / "file").write_text("new")
            raise end

    with pytest.raises(end) as raised:
        write()
    assert not tree(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if isinstance(raised.value, SystemExit):
        assert raised.value.code == 128 + signal.SIGTERM
    if isinstance(raised.value, OSError):
        assert raised.value.filename == str(tmp_path / "in" / "there")


@pytest.mark.parametrize("existed", [False, True])
def test_a_folder_that_is_not_finished_is_as_it_was(existed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "in" / "there"
    if existed:
        folder.mkdir(parents=True)
    before = tree(tmp_path)

    def fill(last: Callable[[], object]) -> None:
        with all_or_nothing(folder):
            (folder / "deep").mkdir(parents=True)
            (folder / "deep" / "a").write_text("half")
            (folder / "b").write_text("half")
            (folder / "link").symlink_to(tmp_path)
            last()

    with pytest.raises(KeyboardInterrupt):
        fill(_interrupt)
    assert tree(tmp_path) == before
    fill(lambda: None)
    assert (folder / "deep" / "a").exists()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_what_can_be_written_is_not_touched_by_the_question(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    check_writable(tmp_path / "a", tmp_path / "in" / "there" / "b")
    assert tree(tmp_path) == {"a": b"old"}


class AlmostFull(io.FileIO):
    """A file on a disk that has little room, and then more."""

    room = 6

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(data[: self.room])
        self.room -= written
        return written


def on_a_full_disk(file: AppendOnlyFile) -> AlmostFull:
    """What the file is written to from now on."""
    file._file.close()
    file._file = AlmostFull(file.path, "ab")
    return file._file


def test_lines_that_find_no_room_wait_for_some(tmp_path: Path) -> None:
    with AppendOnlyFile(tmp_path / "lines") as lines:
        disk = on_a_full_disk(lines)
        assert [lines.write(text) for text in ("one", "two", "three")] == [True, False, False]
        assert (tmp_path / "lines").read_text() == "one\ntw"
        assert lines.take_messages() == [
            f"{tmp_path}/lines does not fit on the disk, and its last lines wait in memory: free some space"
        ]
        assert lines.take_messages() == []
        disk.room = 1000
        assert lines.write("four")
    assert (tmp_path / "lines").read_text() == "one\ntwo\nthree\nfour\n"


@pytest.mark.parametrize("with_its_folder", [False, True])
def test_a_file_that_is_deleted_while_it_grows_is_put_back(with_its_folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "run" / "lines"
    path.parent.mkdir()
    with AppendOnlyFile(path) as lines:
        lines.write("one")
        path.unlink()
        if with_its_folder:
            path.parent.rmdir()
        assert lines.write("two")
        assert lines.take_messages() == [f"{path} was deleted while the run writes it: it is created again"]
        assert lines.write("three")
        assert lines.take_messages() == []
    assert path.read_text() == "one\ntwo\nthree\n"


def test_a_file_that_another_one_replaces_is_followed(tmp_path: Path) -> None:
    """As an editor does it that saves."""
    path = tmp_path / "lines"
    with AppendOnlyFile(path) as lines:
        lines.write("one")
        (tmp_path / "edited").write_text("ONE\n")
        (tmp_path / "edited").replace(path)
        lines.write("two")
        assert lines.take_messages() == []
    assert path.read_text() == "ONE\ntwo\n"
