"""How many tokens of text does a step train on if conversations are packed? python profiling/packing.py [ROUNDS]

Trains the model of configs/finetune_toy.yaml on its conversations, by one compiled step: on packed sequences, and on
one conversation in each sequence. Both fill sequences with padding. Counts the tokens that are not padding, and times
both kinds of batches alternately. Takes about two minutes.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from count_argument import count_argument
from jax.sharding import NamedSharding
from numpy.typing import NDArray
from results_file import quartiles, rounded, write_result

from moe_jax.config.yaml_io import load_config
from moe_jax.data.chat_template import FILE as TEMPLATE
from moe_jax.data.prepare import prepare_text
from moe_jax.data.prepare_chat import pack, prepare_chat
from moe_jax.data.token_marks import FIRST, PADDING
from moe_jax.errors import run_command
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.step.trainer import Trainer, make_trainer

CONFIG = "configs/finetune_toy.yaml"
TEXT = Path(__file__).parents[1] / "configs" / "text"
ROUNDS, STEPS = 12, 8  # steps of each kind in a round

Tokens = NDArray[np.uint32]  # with marks


def packed_sequences(length: int, vocab_size: int) -> Tokens:
    """Return the packed conversations, with the tokenizer of docs/finetuning.md."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare_text(TEXT / "shakespeare.txt", folder / "text", tokenizer="bpe", vocab_size=vocab_size)
        talks, template = TEXT / "conversations.jsonl", TEXT / TEMPLATE
        prepare_chat(talks, folder / "chat", tokenizer=folder / "text", seq_len=length - 1, template=template)
        return np.fromfile(folder / "chat" / "train.bin", "<u4").reshape(-1, length)


def padded_sequences(packed: Tokens) -> Tokens:
    """Return the same conversations, each in a sequence of its own."""
    found: list[Tokens] = []
    for sequence in packed:
        text = sequence[sequence & PADDING == 0]
        for document in np.split(text, np.flatnonzero(text[1:] & FIRST) + 1):
            found += pack([document], len(sequence))
    return np.stack(found)


def seconds(trainer: Trainer, state: Any, batches: list[jax.Array]) -> tuple[float, Any]:
    """Run one step on each batch; return their seconds and the state after them."""
    start = time.perf_counter()
    for batch in batches:
        state, _ = trainer.step(state, batch)
    jax.block_until_ready(state)
    return time.perf_counter() - start, state


def main() -> None:
    """Measure and write results/packing.json; with fewer rounds, packing.quick.json."""
    rounds = count_argument("ROUNDS", ROUNDS, __doc__)
    config = load_config(CONFIG)
    packed = packed_sequences(config.data.seq_len + 1, config.model.vocab_size)
    sequences = {"packed": packed, "padded": padded_sequences(packed)}
    mesh = make_mesh(config.mesh)
    trainer, size, draws = make_trainer(config, mesh), config.train.batch_size, np.random.default_rng(0)
    state, rates = trainer.init(), {name: list[float]() for name in sequences}
    for round_index in range(rounds + 1):
        for name in list(sequences) if round_index % 2 else list(reversed(sequences)):
            rows = [draws.choice(sequences[name], size, replace=False) for _ in range(STEPS)]
            text = sum(int((row[:, :-1] & PADDING == 0).sum()) for row in rows)
            batches = [jax.device_put(row.astype(np.int32), NamedSharding(mesh, BATCH_SPEC)) for row in rows]
            taken_s, state = seconds(trainer, state, batches)
            if round_index:  # the first round compiles
                rates[name].append(text / taken_s)
    ratios = [packed / padded for packed, padded in zip(rates["packed"], rates["padded"], strict=True)]
    values = {
        "rounds": rounds,
        "tokens_of_a_sequence": config.data.seq_len,
        "sequences": {name: len(found) for name, found in sequences.items()},
        "padding": {name: rounded(float((found & PADDING != 0).mean())) for name, found in sequences.items()},
        "text_tokens_per_s": {name: quartiles(found) for name, found in rates.items()},
        "packed_over_padded": quartiles(ratios),
    }
    write_result("packing", values, quick=rounds < ROUNDS)


if __name__ == "__main__":
    run_command(main)
