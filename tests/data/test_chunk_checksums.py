"""Token files are checked where they are read: what is damaged stops a run, or is passed over as often as allowed."""

import json
from pathlib import Path

import numpy as np
import pytest

from moe_jax.config import DataConfig
from moe_jax.data.chunk_checksums import CHUNK_BYTES
from moe_jax.data.loader import Batches, train_batches, validation_batches
from moe_jax.data.mixture import Mixture
from moe_jax.data.prepare import prepare_text
from moe_jax.data.samples import Samples
from moe_jax.data.sources import open_tokens
from moe_jax.data.tokens import verify_tokens
from moe_jax.errors import DataError

SEQ_LEN, BATCH = 100, 16
REMAKE = "make the folder again with scripts/prepare_text.py"
DAMAGED = CHUNK_BYTES + 7  # a byte of the second of four chunks


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of some 250,000 tokens of a byte each."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "in.txt").write_bytes(np.random.default_rng(0).integers(65, 90, 280_000, np.uint8).tobytes())
    prepare_text(folder / "in.txt", folder / "tokens")
    return folder / "tokens"


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    """A copy with another byte in it."""
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokens = bytearray((tmp_path / "train.bin").read_bytes())
    tokens[DAMAGED] ^= 1
    (tmp_path / "train.bin").write_bytes(tokens)
    return tmp_path


def batches_of(folder: Path, damaged_chunks: int = 0) -> Batches:
    data = DataConfig(path=str(folder), seq_len=SEQ_LEN, damaged_chunks=damaged_chunks)
    samples = Samples.of(open_tokens(data, 256)[0], "train", data)
    return train_batches([samples], Mixture.of(data, BATCH, 0), rows=[range(BATCH)], prefetch=3)


def test_a_damaged_byte_stops_the_run_that_reads_it(damaged: Path, sound: Path) -> None:
    batches, expected = batches_of(damaged), batches_of(sound)

    def read() -> None:
        for _ in range(100):
            np.testing.assert_array_equal(next(batches), next(expected))

    with pytest.raises(DataError) as refused:
        read()
    first, last = CHUNK_BYTES, 2 * CHUNK_BYTES - 1
    start, end = str(refused.value).split(": their crc32 is ")
    assert start == f"{damaged}/train.bin is damaged in bytes {first} to {last}"
    assert end.endswith(f": {REMAKE}, or have them passed over with data.damaged_chunks=1")


def test_each_thread_that_reads_one_damaged_chunk_too_many_is_stopped(damaged: Path) -> None:
    """Another thread's batch may be the earlier one."""
    chunks = open_tokens(DataConfig(path=str(damaged), seq_len=SEQ_LEN), 256)[0].train_chunks
    assert chunks is not None
    for _ in range(2):
        with pytest.raises(DataError, match="is damaged in bytes"):
            chunks.is_intact(DAMAGED, DAMAGED + SEQ_LEN)


def test_as_many_chunks_as_allowed_are_passed_over_and_reported(
    damaged: Path, sound: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The batches of a resumed run, too, are those that it would have had."""
    batches, expected, resumed = batches_of(damaged, 1), batches_of(sound), batches_of(damaged, 1)
    resumed.set_state({"next_index": 50})
    whole = np.memmap(sound / "train.bin", np.uint8)
    places = {whole[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1].tobytes(): i for i in range((len(whole) - 1) // SEQ_LEN)}
    replaced = 0
    for number in range(150):
        here, there = next(batches), next(expected)
        if number >= 50:
            np.testing.assert_array_equal(here, next(resumed))
        for row, wanted in zip(here, there, strict=True):
            place = places[row.astype(np.uint8).tobytes()] * SEQ_LEN
            assert place + SEQ_LEN < CHUNK_BYTES or place >= 2 * CHUNK_BYTES, "none of it is in the damaged chunk"
            replaced += not np.array_equal(row, wanted)
    assert 0.2 < replaced / (150 * BATCH) < 0.3, "as many as lay in one of four chunks"
    first, last = CHUNK_BYTES, 2 * CHUNK_BYTES - 1
    line = f"warning: {damaged}/train.bin is damaged in bytes {first} to {last}, which are passed over "
    assert capfd.readouterr().out == 2 * f"{line}(1 of data.damaged_chunks=1)\n"


def test_a_validation_text_is_checked_before_the_first_step(damaged: Path) -> None:
    (damaged / "validation.bin").write_bytes(bytes((damaged / "validation.bin").stat().st_size))
    data = DataConfig(path=str(damaged), seq_len=SEQ_LEN)
    samples = Samples.of(open_tokens(data, 256)[0], "validation", data)
    with pytest.raises(DataError, match=r"validation\.bin is damaged in bytes 0 to 28000: their crc32 is"):
        validation_batches(samples, batch_size=2, num_batches=1, rows=[range(2)])


def test_a_folder_without_checksums_of_chunks_is_read_whole_at_the_start(damaged: Path) -> None:
    meta = json.loads((damaged / "meta.json").read_text())
    del meta["chunk_bytes"]
    (damaged / "meta.json").write_text(json.dumps(meta))
    for read in (lambda: batches_of(damaged), lambda: verify_tokens(damaged)):
        with pytest.raises(DataError, match=r"train\.bin is damaged: its crc32 is \d+, and meta.json says \d+: make"):
            read()


def test_lost_checksums_are_reported(damaged: Path) -> None:
    sums = damaged / "train.crc32"
    sums.write_bytes(sums.read_bytes()[4:])
    with pytest.raises(DataError) as refused:
        batches_of(damaged)
    assert str(refused.value) == f"{sums} is damaged, or of another file: {REMAKE}"
    sums.unlink()
    with pytest.raises(DataError) as refused:
        batches_of(damaged)
    assert str(refused.value) == f"{sums} cannot be read (No such file or directory): {REMAKE}"
