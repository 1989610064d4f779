"""How long grouped products took, kept for other runs; nothing that is wrong with the file stops one."""

from pathlib import Path

import pytest

from moe_jax.run.timing_cache import TimingCache

CACHE = TimingCache("grouped_products.json", "grouped products")

HERE, THERE = {"rows": 64, "device": "this"}, {"rows": 64, "device": "that"}
NAMES = ("blocks", "pallas")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moe_jax" / "grouped_products.json"


def test_times_are_found_again_for_the_same_alone(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert CACHE.path() == file
    assert CACHE.read(HERE, NAMES) is None
    for of, seconds in ((HERE, 1.0), (THERE, 2.0), (HERE, 3.0)):
        CACHE.write(of, {"blocks": seconds})
    assert CACHE.read(HERE, NAMES) == {"blocks": 3.0}
    assert CACHE.read(THERE, NAMES) == {"blocks": 2.0}
    assert CACHE.read(HERE | {"rows": 65}, NAMES) is None
    assert capsys.readouterr().err == ""


def test_a_product_that_is_none_any_more_is_not_found() -> None:
    CACHE.write(HERE, {"blocks": 1.0, "gone": 0.5})
    assert CACHE.read(HERE, NAMES) == {"blocks": 1.0}
    CACHE.write(HERE, {"gone": 0.5})
    assert CACHE.read(HERE, NAMES) is None


@pytest.mark.parametrize(
    "damaged",
    [
        b"{",
        b"{}",
        b"\xff\xfe",
        b"[1]",
        b'[{"of": {}, "seconds": []}]',
        b'[{"of": {}, "seconds": {"blocks": -1.0}}]',
        b'[{"of": {}, "seconds": {"blocks": "1"}}]',
    ],
)
def test_a_damaged_file_is_reported_and_replaced(
    damaged: bytes, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.parent.mkdir()
    file.write_bytes(damaged)
    assert CACHE.read(HERE, NAMES) is None
    assert "warning: cached times of grouped products cannot be read (" in capsys.readouterr().err
    CACHE.write(HERE, {"blocks": 1.0})
    assert CACHE.read(HERE, NAMES) == {"blocks": 1.0}
    assert capsys.readouterr().err == ""


def test_a_place_that_holds_no_files_is_reported(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.parent.write_text("no folder")
    CACHE.write(HERE, {"blocks": 1.0})
    assert "warning: times of grouped products cannot be cached (" in capsys.readouterr().err
    assert CACHE.read(HERE, NAMES) is None


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert CACHE.read(HERE, NAMES) is None
    CACHE.write(HERE, {"blocks": 1.0})
    assert capsys.readouterr().err.count("no home") == 2
