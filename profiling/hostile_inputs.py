"""Inputs that every command has to reject: files, settings, flags and environments. Each gets an error of one line.

`profiling/refusals.py` tries them through real processes, `tests/bad_input/test_hostile.py` through the commands'
`main`. Commands run in a folder that `make_inputs` has filled. Each input is one line of a table: its name, and a
command line.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hostile_files import CONFIGS, CONVERTED, METAS, METRICS, PARTS, PROFILES, TASK_TIMES, TUNED

from moe_jax.data.prepare import prepare_text

MODEL = Path(__file__).resolve().parents[1] / "tests/golden/mixtral"
TINY = """
model: {hidden_size: 16, num_layers: 1, num_attention_heads: 2, moe: {num_experts: 4, top_k: 2, intermediate_size: 16}}
data: {path: text.txt, seq_len: 16}
train: {steps: 4, batch_size: 8, compute_dtype: float32}
log: {dir: new, sample_tokens: 0, tensorboard: false}
"""
HUGE = "1" + "0" * 400


class Hostile(NamedTuple):
    """One input: its name, and a command that has to reject it."""

    name: str
    command: str  # verb (train, plan and so on) and arguments
    environ: Mapping[str, str] = {}
    streams: str = ""  # standard streams that are closed, as a shell closes them


def make_inputs(folder: Path) -> None:
    """Fill an empty folder."""
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    (folder / "hostile_parts.py").write_text(PARTS)
    (folder / "exits.py").write_text("import sys\n\nsys.exit(3)\n")
    for kind, files, suffix in (
        ("configs", CONFIGS, ".yaml"),
        ("profiles", PROFILES, ".json"),
        ("times", TASK_TIMES, ".json"),
        ("tuned", TUNED, ".json"),
    ):
        (folder / kind).mkdir()
        for name, content in files.items():
            (folder / kind / f"{name}{suffix}").write_bytes(content)
    for name, content in METRICS.items():
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "metrics.jsonl").write_bytes(content)
    prepare_text(folder / "text.txt", folder / "tokens")
    meta = json.loads((folder / "tokens/meta.json").read_text())
    for name, change in METAS.items():
        shutil.copytree(folder / "tokens", folder / "prepared" / name)
        content = change if isinstance(change, bytes) else json.dumps(meta | change).encode()
        (folder / "prepared" / name / "meta.json").write_bytes(content)
    settings = json.loads((MODEL / "config.json").read_text())
    for name, change in CONVERTED.items():
        shutil.copytree(MODEL, folder / "models" / name)
        content = change if isinstance(change, bytes) else json.dumps(settings | change).encode()
        (folder / "models" / name / "config.json").write_bytes(content)
    _make_fifos(folder)


def _make_fifos(folder: Path) -> None:
    """Create named pipes: opening one blocks until there is a writer."""
    for kind, name, file in (
        ("prepared", "fifo_meta", "meta.json"),
        ("prepared", "fifo_tokens", "train.bin"),
        ("prepared", "fifo_checksums", "train.crc32"),
        ("models", "fifo_config", "config.json"),
        ("models", "fifo_index", "model.safetensors.index.json"),
        ("models", "fifo_weights", "model-00001-of-00002.safetensors"),
    ):
        shutil.copytree(folder / "tokens" if kind == "prepared" else MODEL, folder / kind / name)
        (folder / kind / name / file).unlink()
        os.mkfifo(folder / kind / name / file)
    (folder / "runs/fifo").mkdir()
    for fifo in (
        "fifo.yaml",
        "fifo.json",
        "fifo.txt",
        "fifo.jsonl",
        "fifo.parquet",
        "tokenizer.json",
        "runs/fifo/metrics.jsonl",
    ):
        os.mkfifo(folder / fifo)
    (folder / "loop.yaml").symlink_to("loop.yaml")


DRY = "train --config tiny.yaml --dry-run"
PLAN = "plan --model tiny.yaml --cluster h100x8"
LAUNCH = "launch --processes 2 --config tiny.yaml"
# Sizes at which something would take hours or all memory
SIZES = (
    *(
        "model.num_layers",
        "model.vocab_size",
        "model.hidden_size",
        "model.num_attention_heads",
        "model.intermediate_size",
    ),
    *("model.moe.num_experts", "model.moe.intermediate_size", "model.moe.num_shared_experts", "schedule.microbatches"),
    *("schedule.expert_chunks", "schedule.unroll", "schedule.virtual_stages", "schedule.head_blocks"),
    *("exchange.tensor_chunks", "mesh.cpu_devices", "mesh.data", "mesh.pipeline", "data.seq_len", "data.prefetch"),
    *("train.batch_size", "train.grad_accumulation", "tune.samples", "migration.replicas", "log.sample_tokens"),
)
NUMBERS = {
    "an infinite rate": "optimizer.learning_rate=1e999",
    "a rate of 401 digits": f"optimizer.learning_rate={HUGE}",
    "steps of 401 digits": f"train.steps={HUGE}",
    "a number of 5,000 digits": f"train.steps={'9' * 5000}",
    "no number as a rate": "optimizer.learning_rate=.nan",
    "a negative infinity": "model.rope_theta=-.inf",
    "a huge exponent": "train.steps=1e300",
    "a negative seed": "train.seed=-1",
    "a seed beyond 32 bits": "train.seed=4294967296",
    "a batch below nothing": "train.batch_size=-8",
    "a capacity without bound": "model.moe.capacity_factor=1e300",
    "a capacity later without bound": "model.moe.capacity_schedule=[[2,1e300]]",
    "a step of a capacity without bound": "model.moe.capacity_schedule=[[1e999,2]]",
    "a buffer without bound": "exchange.rank_capacity_factor=1e300",
    "chunks of nothing": "schedule.grad_reduce=bucketed schedule.bucket_cap_mb=0",
    "a clip beyond float32": "optimizer.clip_norm=1e300",
    "a fraction above one": "optimizer.final_fraction=1e9",
    "a decay without bound": "optimizer.weight_decay=1e30",
    "a trace of no step": "log.trace_step=[-5,-1]",
    "true as a number": "train.steps=true",
    "text as a number": "train.steps=ten",
    "a list as a number": "train.steps=[1,2]",
    "a section as a number": "'train.steps={a: 1}'",
    "null as a number": "train.steps=null",
    "a date as a number": "train.steps=2026-11-26",
}
TEXTS = {
    "a NUL byte in the folder": "'log.dir=\"a\\0b\"'",
    "a NUL byte in the data": "'data.path=\"a\\0b\"'",
    "a surrogate in the folder": "'log.dir=\"\\ud800\"'",
    "a surrogate in the prompt": "'log.sample_prompt=\"\\udfff\"'",
    "a byte that is no UTF-8": "log.dir=\udcff",
    "a terminal's escape": "'model.moe.gate=\"\\e[2J\"'",
    "a bell": "'train.\"\\a\"=1'",
    "a tag of Python": "'train.steps=!!python/object/apply:os.system [true]'",
    "a tag of a number": "'train.steps=!!int \"\"'",
    "a tag of a date": "'train.steps=!!timestamp x'",
    "an unknown alias": "'train.steps=*steps'",
    "a list of itself": "'tune.over=&a [*a]'",
    "brackets without end": f"'train.steps={'[' * 5000}'",
    "sections in sections": f"'train.steps={'{a: ' * 5000}'",
    "a key of 100 kB": f"{'k' * 100_000}=1",
    "a word of 100 kB": f"schedule.remat={'w' * 100_000}",
    "no equals sign": "train.steps",
    "a setting below a setting": "train.steps.more=1",
    "no name": "=1",
    "a module of two dots": "model.moe.gate=a..b:c",
    "a module of the dark": "model.moe.gate=no.such.module:choose",
    "a module that exits": "model.moe.gate=exits:choose",
}
MADE = {
    "a gate with one argument": "model.moe.gate=hostile_parts:few",
    "a gate that returns nothing": "model.moe.gate=hostile_parts:nothing",
    "a gate that returns text": "model.moe.gate=hostile_parts:text",
    "a gate of flat weights": "model.moe.gate=hostile_parts:flat",
    "a gate that asks a tracer": "model.moe.gate=hostile_parts:branch",
    "a gate that fails": "model.moe.gate=hostile_parts:fails",
    "a gate that is a number": "model.moe.gate=hostile_parts:NUMBER",
    "a gate that is not there": "model.moe.gate=hostile_parts:nowhere",
    "hooks without arguments": "model.moe.hooks=hostile_parts:NO_ARGUMENTS",
    "hooks that lose rows": "model.moe.hooks=hostile_parts:SHORTER",
    "hooks that are a number": "model.moe.hooks=hostile_parts:NUMBER",
    "a dispatcher that takes one": "model.moe.dispatcher=hostile_parts:ONE",
    "a dispatcher without metadata": "model.moe.dispatcher=hostile_parts:PAIRLESS",
    "a policy without parts": "schedule.policy=hostile_parts:PARTLESS",
    "a policy of a billion parts": "schedule.policy=hostile_parts:TOO_FINE",
    "a policy without lists": "schedule.policy=hostile_parts:LISTLESS",
    "a policy that fails": "schedule.policy=hostile_parts:BROKEN",
}
FLAGS = {
    "no tokens": "generate --run runs/text_as_loss --tokens 0",
    "a billion tokens": "generate --run runs/text_as_loss --tokens 1000000000",
    "tokens of 401 digits": f"generate --run runs/text_as_loss --tokens {HUGE}",
    "an infinite temperature": "generate --run runs/text_as_loss --temperature 1e999",
    "a temperature that is no number": "generate --run runs/text_as_loss --temperature nan",
    "a seed below nothing": "generate --run runs/text_as_loss --seed -1",
    "a run that is a device": "generate --run /dev/null",
    "a prompt without a run": "generate --prompt x",
    "a billion seconds between pages": "report runs/text_as_loss --watch 1000000000",
    "no seconds between pages": "report runs/text_as_loss --watch 0",
    "a run that is a file": "report text.txt",
    "a run that is a device, reported": "report /dev/zero",
    "a target of a billion devices": "report --compile v5p:1000000000x1x1 --config tiny.yaml",
    "a target without devices": "report --compile cpu:0 --config tiny.yaml",
    "an unknown target": "report --compile abacus:8 --config tiny.yaml",
    "a billion processes": "launch --processes 1000000000",
    "no processes": "launch --processes 0",
    "a billion hosts": "launch --processes 1 --hosts 1000000000 --host 0",
    "an infinite grace": f"{LAUNCH} --grace inf",
    "a grace that is no number": f"{LAUNCH} --grace nan",
    "a wait beyond all clocks": f"{LAUNCH} --progress-timeout 1e300",
    "a start that may take no time": f"{LAUNCH} --start-timeout 0",
    "a billion retries": f"{LAUNCH} --retries 1000000000",
    "a port beyond all ports": f"{LAUNCH} --port 1000000000",
    "a module that is not there": "launch --processes 2 --module no.such.module",
    "a billion rounds": "measure --rounds 1000000000",
    "a billion simulated devices": "measure --cpu-devices 1000000000",
    "nodes of no devices": "measure --node-devices 0",
    "a profile into a device": "measure --out /dev/full/profile.json",
    "an unknown measurement": "measure --only everything",
    "a cluster of a billion": "plan --model tiny.yaml --cluster h100x1000000000",
    "a cluster of 401 digits": f"plan --model tiny.yaml --cluster h100x{HUGE}",
    "a cluster of nothing": "plan --model tiny.yaml --cluster h100x0",
    "a plan of a billion layers": f"{PLAN} model.num_layers=1000000000",
    "a plan of a billion sequences": f"{PLAN} train.batch_size=1000000000",
    "a plan into a device": f"{PLAN} --out /dev/null",
    "a process beyond all": f"{DRY} --coordinator h:1 --num-processes 2 --process-id 1000000000",
    "a billion of one run": f"{DRY} --coordinator h:1 --num-processes 1000000000 --process-id 0",
    "a coordinator without a port": f"{DRY} --coordinator host --num-processes 2 --process-id 0",
    "a vocabulary of a billion": "prepare_text text.txt out --tokenizer bpe --vocab-size 1000000000",
    "a fraction that is no number": "prepare_text text.txt out --validation-fraction nan",
    "a tokenizer that is a device": "prepare_text text.txt out --tokenizer /dev/zero",
    "a flag of another command": f"{DRY} --tokens 5",
    "an empty config": "train --config ''",
}
FILES = {
    "a config that is a FIFO": "train --config fifo.yaml",
    "a config that is endless": "train --config /dev/zero",
    "a config that is empty for ever": "train --config /dev/tty0",
    "a config that links to itself": "train --config loop.yaml",
    "a config below a file": "train --config text.txt/tiny.yaml",
    "a config of a strange name": "train --config \udcff.yaml",
    "a config of a long name": f"train --config {'n' * 5000}.yaml",
    "a planned config that is a FIFO": "plan --model fifo.yaml --cluster h100x8",
    "a cluster that is a FIFO": "plan --model tiny.yaml --cluster fifo.json",
    "times that are a FIFO": f"{DRY} schedule.policy=unified schedule.task_times=fifo.json",
    "times that are endless": f"{DRY} schedule.policy=unified schedule.task_times=/dev/zero",
    "a text that is a FIFO": "train --config tiny.yaml data.path=fifo.txt",
    "a text that is a device": "train --config tiny.yaml data.path=/dev/zero",
    "a text to prepare that is a FIFO": "prepare_text fifo.txt out",
    "lines to prepare that are a FIFO": "prepare_text fifo.jsonl out",
    "a table to prepare that is a FIFO": "prepare_text fifo.parquet out",
    "a tokenizer that is a FIFO": "prepare_text text.txt out --tokenizer tokenizer.json",
    "tokens to verify that are a FIFO": "prepare_text prepared/fifo_tokens --verify",
    "meta that is a FIFO": "train --config tiny.yaml data.path=prepared/fifo_meta",
    "tokens that are a FIFO": "train --config tiny.yaml data.path=prepared/fifo_tokens",
    "checksums that are a FIFO": "train --config tiny.yaml data.path=prepared/fifo_checksums",
    "records that are a FIFO": "report runs/fifo",
    "a model's settings that are a FIFO": "convert import models/fifo_config --out imported",
    "a model's index that is a FIFO": "convert import models/fifo_index --out imported",
    "a model's weights that are a FIFO": "convert import models/fifo_weights --out imported",
    "an import over a device": "convert import models/wrong_type --out /dev/null",
    "an export of a device": "convert export /dev/zero --out exported",
}
AROUND = (
    Hostile("an unknown flag of XLA", DRY, {"XLA_FLAGS": "--xla_no_such_flag=1"}),
    Hostile("a flag of XLA without a value of it", DRY, {"XLA_FLAGS": "--xla_cpu_enable_fast_math=perhaps"}),
    Hostile("an unknown flag of XLA, planned", PLAN, {"XLA_FLAGS": "--xla_no_such_flag=1"}),
    Hostile("TPUs that are not there", DRY, {"JAX_PLATFORMS": "tpu"}),
    Hostile("GPUs that are not there", DRY, {"JAX_PLATFORMS": "cuda"}),
    Hostile("devices that nobody makes", DRY, {"JAX_PLATFORMS": "abacus"}),
    Hostile("TPUs that are not there, measured", "measure --quick", {"JAX_PLATFORMS": "tpu"}),
    Hostile("a closed output", DRY, streams=">&-"),
    Hostile("a closed output of a plan", PLAN, streams=">&-"),
    Hostile("all closed but the errors", "report runs/text_as_loss", streams="<&- >&-"),
)


def hostile_inputs() -> Iterator[Hostile]:
    """Yield all inputs."""
    yield from (Hostile(f"config: {name}", f"train --config configs/{name}.yaml --dry-run") for name in CONFIGS)
    yield from (Hostile(f"a billion: {name}", f"{DRY} {name}=1000000000") for name in SIZES)
    for table in (NUMBERS, TEXTS, MADE):
        yield from (Hostile(name, f"{DRY} {words}") for name, words in table.items())
    for table in (FLAGS, FILES):
        yield from (Hostile(name, command) for name, command in table.items())
    yield from (Hostile(f"records: {name}", f"report runs/{name}") for name in METRICS)
    yield from (Hostile(f"meta: {name}", f"train --config tiny.yaml data.path=prepared/{name}") for name in METAS)
    yield from (Hostile(f"model: {name}", f"convert import models/{name} --out imported") for name in CONVERTED)
    yield from (
        Hostile(f"profile: {name}", f"plan --model tiny.yaml --cluster profiles/{name}.json") for name in PROFILES
    )
    yield from (
        Hostile(f"times: {name}", f"{DRY} schedule.policy=unified schedule.task_times=times/{name}.json")
        for name in TASK_TIMES
    )
    yield from (
        Hostile(f"tuned: {name}", f"train --config tiny.yaml tune.over=algorithm tune.cache=tuned/{name}.json")
        for name in TUNED
    )
    yield from AROUND
