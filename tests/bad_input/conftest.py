"""What every command says to bad input: one exact line and exit code 2, no stack, and not a byte written.

Each case is a command line, run in a folder that has the files of `INPUTS`, the token folders of `prepared` and,
where a case needs it, a trained run in `run/`. All files of this folder share what is compiled and trained once.
"""

import gzip
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_jax.config.yaml_io import load_config
from moe_jax.data.prepare import prepare_text
from moe_jax.errors import run_command
from moe_jax.run import loop
from moe_jax.run.setup import Programs, Run, compile_programs
from tests.bad_input.cases import COMMANDS, Command, Refusal, Said, tree

PLAIN_HLO = """HloModule jit_step, is_scheduled=true

ENTRY %main () -> f32[] {
  ROOT %zero = f32[] constant(0), metadata={op_name="jit(step)/jvp(mul)"}
}
"""


def traced(module: str) -> bytes:
    """A trace of `PLAIN_HLO`, or of another module."""
    event = {"ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 1.0, "name": "zero"}
    event["args"] = {"hlo_module": module, "hlo_op": "zero", "device_ordinal": "0"}
    return gzip.compress(json.dumps({"traceEvents": [event]}).encode())


INPUTS: dict[str, str | bytes] = {
    "tiny.yaml": """
model: {hidden_size: 16, num_layers: 1, num_attention_heads: 2, moe: {num_experts: 4, top_k: 2, intermediate_size: 16}}
data: {path: text.txt, seq_len: 16}
train: {steps: 4, batch_size: 8, compute_dtype: float32}
checkpoint: {every: 2}
log: {dir: run, sample_tokens: 0, tensorboard: false}
""",
    "text.txt": "the quick brown fox jumps over the lazy dog\n" * 60,
    "short.txt": "too short",
    "middle.txt": "m" * 300,
    "empty.txt": "",
    "latin1.txt": "caf\xe9 noir".encode("latin1"),
    "page.html": "<p>text</p>",
    "broken.jsonl": '{"text": "a"}\n{"text": \n',
    "other_key.jsonl": '{"body": "a"}\n',
    "full/notes": "mine",
    "broken.yaml": "train: {steps: 4\n",
    "twice.yaml": "train:\n  steps: 4\n  seed: 1\n  steps: 5\n",
    "list.yaml": "- train\n",
    "nothing.yaml": "",
    "only_steps.yaml": "model:\ntrain: {steps: 4}\n",
    "binary.yaml": bytes(range(128, 256)),
    "file": "in the way",
    "folder.yaml/notes": "mine",
    "told.txt/notes": "mine",
    "run_traced/trace/0/step.hlo": PLAIN_HLO,
    "run_traced/trace/0/vm.trace.json.gz": traced("jit_step"),
    "untraced/step.hlo": PLAIN_HLO,
    "other_program/step.hlo": PLAIN_HLO,
    "other_program/vm.trace.json.gz": traced("jit_init"),
    "no_hlo/step.hlo": "HloModule\n",
    "no_hlo/vm.trace.json.gz": traced("jit_step"),
    "cut_hlo/step.hlo": PLAIN_HLO[:-2],
    "cut_hlo/vm.trace.json.gz": traced("jit_step"),
    "odd_trace/step.hlo": PLAIN_HLO,
    "odd_trace/vm.trace.json.gz": gzip.compress(b'{"traceEvents": [1]}'),
    "cut_trace/step.hlo": PLAIN_HLO,
    "cut_trace/vm.trace.json.gz": traced("jit_step")[:30],
}


@pytest.fixture(scope="package")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, content in INPUTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    prepare_text(folder / "text.txt", folder / "tokens")
    prepare_text(folder / "text.txt", folder / "bpe", tokenizer="bpe", vocab_size=260)
    for name, damage in (
        ("cut_tokens", lambda path: (path / "train.bin").write_bytes(b"abc")),
        ("no_tokens", lambda path: (path / "validation.bin").unlink()),
        ("no_meta", lambda path: (path / "meta.json").unlink()),
        ("bad_meta", lambda path: (path / "meta.json").write_text("[]")),
    ):
        shutil.copytree(folder / "tokens", folder / name)
        damage(folder / name)
    shutil.copytree(folder / "bpe", folder / "no_tokenizer")
    (folder / "no_tokenizer" / "tokenizer.json").unlink()
    return folder


@pytest.fixture(scope="package")
def compiled_once() -> Iterator[None]:
    """Compile the tiny config's programs once for all cases that get so far."""
    done: list[Programs] = []

    def compile_first(run: Run) -> Programs:
        done.extend([] if done else [compile_programs(run)])
        return done[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "compile_programs", compile_first)
        yield


@pytest.fixture(scope="package")
def trained(prepared: Path, compiled_once: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(prepared)
        loop.train(load_config("tiny.yaml", [f"log.dir={folder}/run"]))
    saved = folder / "run" / "config.yaml"
    saved.write_text(saved.read_text().replace(f"{folder}/run", "run"))
    return folder / "run"


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the inputs, as the current folder."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder: Path, trained: Path) -> Path:
    """A copy of the trained run, below the current folder."""
    shutil.copytree(trained, folder / "run")
    return Path("run")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    def call(line: str) -> Said:
        name, *arguments = shlex.split(line)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ending:
            run_command(COMMANDS[name])
        assert isinstance(ending.value.code, int)
        return Said(ending.value.code, capfd.readouterr().err)

    return call


@pytest.fixture
def assert_refused(folder: Path, command: Command) -> Refusal:
    """Checks that a command line gets one line with exit code 2, and leaves nothing behind."""

    def check(line: str, message: str) -> None:
        before = tree(folder)
        assert command(line) == Said(2, f"error: {message}\n")
        assert tree(folder) == before

    return check
