"""How fast are batches read from token files, mixtures and text? python profiling/data_sources.py [ROUNDS]

Reads batches without prefetching from a prepared folder, from mixtures of folders, and from the same text as .jsonl and
.parquet files, which is encoded while it is read. Also times the counting of the text's tokens, and the preparation of
the folder, which are done once. The text is Shakespeare's, eight times, cut into documents of log-normal lengths. Takes
about two minutes.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from count_argument import count_argument
from pyarrow import parquet
from results_file import quartiles, rounded, write_result

from moe_jax.config import DataConfig
from moe_jax.config.sections import DataSource
from moe_jax.data.loader import train_batches
from moe_jax.data.mixture import Mixture
from moe_jax.data.prepare import prepare_text
from moe_jax.data.samples import Samples
from moe_jax.data.sources import open_tokens
from moe_jax.errors import run_command

TEXT = Path(__file__).parents[1] / "configs" / "text" / "shakespeare.txt"
ROUNDS, COPIES, BATCH, VOCABULARY = 5, 8, 64, 8192
LENGTHS = (256, 1024)  # tokens of a sequence
BATCHES = {"folder": 200, "mixture of 2": 200, "mixture of 10": 200, "jsonl": 6, "parquet": 6}  # in a round


def documents() -> list[str]:
    """Return the text in documents of 1,800 characters as median."""
    text, lengths = TEXT.read_text(encoding="utf-8"), np.random.default_rng(0)
    found = []
    for _ in range(COPIES):
        begin = 0
        while begin < len(text):
            end = begin + int(lengths.lognormal(7.5, 1.0)) + 1
            found.append(text[begin:end])
            begin = end
    return found


def seconds_of(action: Any) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def rates(data: DataConfig, batches: int, rounds: int) -> list[float]:
    """Return the tokens per second in each round, after one that warms up."""
    sources = [Samples.of(tokens, "train", data) for tokens in open_tokens(data, VOCABULARY)]
    found = train_batches(sources, Mixture.of(data, BATCH, 0), rows=[range(BATCH)], prefetch=0)

    def read() -> None:
        for _ in range(batches):
            next(found)

    return [BATCH * data.seq_len * batches / seconds_of(read) for _ in range(rounds + 1)][1:]


def main() -> None:
    """Measure and write results/data_sources.json; with fewer rounds, data_sources.quick.json."""
    rounds = count_argument("ROUNDS", ROUNDS, __doc__)
    texts = documents()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        parquet.write_table(pyarrow.table({"text": texts}), folder / "text.parquet", row_group_size=1000)
        prepare_text(folder / "text.jsonl", folder / "bpe", tokenizer="bpe", vocab_size=VOCABULARY)
        prepared = seconds_of(lambda: prepare_text(folder / "text.jsonl", folder / "folder", tokenizer=folder / "bpe"))

        def data_of(name: str, seq_len: int) -> DataConfig:
            number = int(name.split()[-1]) if "mixture" in name else 0
            sources = tuple(DataSource(path=str(folder / "folder"), weight=k + 1.0, name=f"{k}") for k in range(number))
            if "mixture" in name:
                return DataConfig(path=None, sources=sources, seq_len=seq_len)
            if name == "folder":
                return DataConfig(path=str(folder / name), seq_len=seq_len)
            return DataConfig(path=str(folder / f"text.{name}"), seq_len=seq_len, tokenizer=str(folder / "bpe"))

        (tokens,) = open_tokens(data_of("folder", 256), VOCABULARY)
        counted = seconds_of(lambda: open_tokens(data_of("jsonl", 256), VOCABULARY))
        (index,) = folder.glob(".text.jsonl.*")
        values = {
            "megabytes": rounded(sum(len(text.encode()) for text in texts) / 1e6),
            "documents": len(texts),
            "million_tokens": rounded((len(tokens.train) + len(tokens.validation)) / 1e6),
            "seconds": {"prepare a folder": rounded(prepared), "count tokens": rounded(counted)},
            "bytes_on_disk": {
                "tokens": sum(file.stat().st_size for file in (folder / "folder").glob("*.bin")),
                "index": index.stat().st_size,
            },
            "million_tokens_per_s": {
                name: {
                    str(seq_len): quartiles([rate / 1e6 for rate in rates(data_of(name, seq_len), batches, rounds)])
                    for seq_len in LENGTHS
                }
                for name, batches in BATCHES.items()
            },
        }
    write_result("data_sources", values, quick=rounds < ROUNDS)


if __name__ == "__main__":
    run_command(main)
