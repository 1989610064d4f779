"""What every command says to bad input: one exact line and exit code 2, no stack, and not a byte written.

Each case is a command line, run in a folder that has the files of `INPUTS`, the token folders of `prepared` and,
where a case needs it, a trained run in `run/`. The file is long because it is one table of such cases after another,
over one set of fixtures that compiles and trains once.
"""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moe_jax import generate, launch
from moe_jax.config_files import load_config
from moe_jax.errors import run_command
from moe_jax.report import __main__ as report
from moe_jax.train import __main__ as train
from moe_jax.train import loop
from moe_jax.train.prepare import prepare_text
from moe_jax.train.setup import Programs, Run, compile_programs

ROOT = Path(__file__).parents[1]

INPUTS: dict[str, str | bytes] = {
    "tiny.yaml": """
model: {d_model: 16, num_layers: 1, num_heads: 2, moe: {num_experts: 4, top_k: 2, hidden_dim: 16}}
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
    "binary.yaml": bytes(range(128, 256)),
    "file": "in the way",
}


def _script_main() -> None:
    spec = importlib.util.spec_from_file_location("prepare_text", ROOT / "scripts" / "prepare_text.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


COMMANDS: dict[str, Callable[[], None]] = {
    "train": train.main,
    "generate": generate.main,
    "report": report.main,
    "launch": launch.main,
    "prepare_text": _script_main,
}


class Said(NamedTuple):
    code: int
    errors: str


Command = Callable[[str], Said]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, content in INPUTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
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


@pytest.fixture(scope="module")
def compiled_once() -> Iterator[None]:
    """Compile the tiny config's programs once for all cases that get so far."""
    done: list[Programs] = []

    def compile_first(run: Run) -> Programs:
        done.extend([] if done else [compile_programs(run)])
        return done[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "compile_programs", compile_first)
        yield


@pytest.fixture(scope="module")
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


def cases(table: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The rows of a table under the name that each has in front."""
    return [pytest.param(*row[1:], id=row[0]) for row in table]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content, and every folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


CONFIG = [
    ("an unknown key", "train.stpes=4", "unknown setting train.stpes: did you mean train.steps?"),
    ("a key of another section", "train.lr=1", "unknown setting train.lr: did you mean optimizer.learning_rate?"),
    ("no key", "train", "override 'train' is not of the form section.key=value, e.g. train.steps=100"),
    ("a wrong type", "train.steps=many", "train.steps='many' must be a whole number, not text"),
    ("a fraction of a step", "train.steps=0.5", "train.steps=0.5 must be a whole number, not a number"),
    (
        "no YAML",
        "'train.steps=]'",
        "override 'train.steps=]': expected the node content, but found ']' at line 1, column 1",
    ),
    ("out of range", "train.batch_size=0", "train.batch_size=0 must be at least 1"),
    ("more than jax counts", "train.seed=3_000_000_000", "train.seed=3000000000 must be at most 2147483647"),
    ("not a number", "optimizer.learning_rate=.nan", "optimizer.learning_rate=nan must be a finite number"),
    ("several lines", "'model.moe.gate=\"a\\nb\"'", "model.moe.gate=a b must be softmax or sigmoid"),
    ("an unknown choice", "schedule.remat=ful", "schedule.remat=ful must be none or dots or full: did you mean full?"),
    ("more choices than experts", "model.moe.top_k=5", "model.moe.top_k=5 must be 1..model.moe.num_experts=4"),
    (
        "heads that do not divide the width",
        "model.num_heads=3",
        "model.d_model=16 is not divisible by model.num_heads=3: use 1, 2, 4, 8 or 16 heads, or set model.head_dim",
    ),
]

PIPELINES = (
    "needs a policy that pipelines: use schedule.policy=unified or expert_pipeline "
    "(vanilla runs one microbatch; train.grad_accumulation cuts the batch in time)"
)

SCHEDULE = [
    (
        "an unknown policy",
        "schedule.policy=unifed",
        "schedule.policy=unifed must be vanilla or expert_pipeline or unified: did you mean unified?",
    ),
    (
        "an unknown place for weight gradients",
        "schedule.weight_grad=late",
        "schedule.weight_grad=late must be inline or greedy",
    ),
    (
        "an unknown place for reductions",
        "schedule.grad_reduce=chunk",
        "schedule.grad_reduce=chunk must be end or block or chunked: did you mean chunked?",
    ),
    ("no microbatch", "schedule.microbatches=0", "schedule.microbatches=0 must be at least 1"),
    (
        "no microbatch backward",
        "schedule.policy=unified schedule.backward_microbatches=0",
        "schedule.backward_microbatches=0 must be at least 1",
    ),
    ("microbatches without a policy for them", "schedule.microbatches=2", f"schedule.microbatches=2 {PIPELINES}"),
    (
        "microbatches of the backward pass alone",
        "schedule.backward_microbatches=2",
        f"schedule.backward_microbatches=2 {PIPELINES}",
    ),
    (
        "a backward pass cut where the forward pass is not",
        "schedule.policy=unified schedule.microbatches=4 schedule.backward_microbatches=3",
        "schedule.backward_microbatches=3 cannot be made of schedule.microbatches=4: use 1, 2 or 4",
    ),
    (
        "a batch cut before its tokens are compared",
        "schedule.policy=unified schedule.microbatches=2 model.moe.slot_priority=score",
        "model.moe.slot_priority=score ranks all tokens of a batch, and schedule.microbatches=2 cuts the batch before: "
        "use schedule.policy=expert_pipeline, which cuts behind the gate, or model.moe.slot_priority=position",
    ),
    (
        "tokens in the order of their scores without slots",
        "model.moe.slot_priority=score model.moe.capacity_factor=null",
        "model.moe.slot_priority=score needs model.moe.capacity_factor and model.moe.order=sort: "
        "set them, or model.moe.slot_priority=position",
    ),
    (
        "a batch that does not divide into microbatches",
        "schedule.policy=unified schedule.microbatches=2",
        "train.batch_size=8 is not divisible by train.grad_accumulation=1 × 8 devices (data × expert) "
        "× schedule.microbatches=2 = 16: use 16",
    ),
    (
        "chunks of a reduction that is whole",
        "schedule.grad_reduce=block schedule.chunk_mb=1",
        "schedule.chunk_mb=1.0 cuts nothing with schedule.grad_reduce=block: "
        "set schedule.grad_reduce=chunked, or schedule.chunk_mb=null",
    ),
    (
        "chunks of nothing",
        "schedule.grad_reduce=chunked schedule.chunk_mb=0",
        "schedule.chunk_mb=0.0 must be above 0 (or null)",
    ),
    (
        "chunks of no size",
        "schedule.grad_reduce=chunked schedule.chunk_mb=.nan",
        "schedule.chunk_mb=nan must be a finite number",
    ),
    (
        "an unknown all-to-all",
        "exchange.algorithm=rings",
        "exchange.algorithm=rings must be auto or flat or ring or ragged or background: did you mean ring?",
    ),
    (
        "an unknown reduction",
        "exchange.reduction=allreduce",
        "exchange.reduction=allreduce must be all_reduce or scatter_gather or ring or background: "
        "did you mean all_reduce?",
    ),
    (
        "an irregular exchange of a whole batch",
        "exchange.algorithm=ragged",
        "exchange.algorithm=ragged sends microbatches, which schedule.policy=vanilla does not have: "
        "use schedule.policy=unified, or exchange.algorithm=auto",
    ),
    (
        "an irregular exchange without slots",
        "exchange.algorithm=ragged schedule.policy=unified model.moe.capacity_factor=null",
        "exchange.algorithm=ragged needs model.moe.capacity_factor and model.moe.order=sort: "
        "set them, or exchange.algorithm=auto",
    ),
]

MESH = [
    (
        "experts that do not divide",
        "mesh.expert=8",
        "model.moe.num_experts=4 is not divisible by mesh.expert=8: use 8 experts, or mesh.expert=1, 2 or 4",
    ),
    (
        "experts that do not divide over what is left",
        "mesh.data=1 mesh.expert=-1",
        "model.moe.num_experts=4 is not divisible by mesh.expert=8: use 8 experts, or mesh.expert=1, 2 or 4",
    ),
    (
        "a product of too few devices",
        "mesh.data=3",
        "mesh: data=3 × expert=1 = 3, but there are 8 devices: use mesh.data=8 or mesh.data=-1",
    ),
    (
        "a product of too many devices",
        "mesh.data=4 mesh.expert=4",
        "mesh: data=4 × expert=4 = 16, but there are 8 devices: use mesh.data=2 or mesh.data=-1",
    ),
    (
        "an axis that does not divide the devices",
        "mesh.expert=5 model.moe.num_experts=5",
        "mesh: expert=5 = 5 does not divide the 8 devices, so mesh.data=-1 has no value: "
        "use mesh.expert=4 with mesh.data=-1",
    ),
    (
        "two axes that take the rest",
        "mesh.expert=-1",
        "mesh.data and mesh.expert are both -1, and only one axis can take the remaining devices: set mesh.data=1",
    ),
    (
        "an axis that is not there yet",
        "mesh.pipeline=2",
        "mesh.pipeline=2 is not supported: only data and expert may exceed 1, so set mesh.pipeline=1",
    ),
    (
        "a batch that does not divide",
        "train.batch_size=12",
        "train.batch_size=12 is not divisible by train.grad_accumulation=1 × 8 devices (data × expert) = 8: "
        "use 8 or 16",
    ),
    (
        "simulated devices after jax has started",
        "mesh.cpu_devices=4",
        "mesh.cpu_devices=4 comes too late, jax already runs with 8 cpu devices here: "
        "restart Python, or set mesh.cpu_devices=null",
    ),
    (
        "a coordinator alone",
        "--coordinator=here:8476",
        "--coordinator=here:8476 also needs --num-processes and --process-id: give all three or none",
    ),
    (
        "a coordinator without a port",
        "--coordinator=here --num-processes=2 --process-id=0",
        "--coordinator=here must be HOST:PORT with a port in 1..65535, e.g. 10.0.0.1:8476",
    ),
]

DATA = [
    ("no text", "data.path=", "data.path is empty: name a .txt file or a prepared folder"),
    ("a missing text", "data.path=txt.txt", "data.path=txt.txt does not exist: did you mean text.txt?"),
    ("a missing folder", "data.path=a/b/c", "data.path=a/b/c does not exist: name a .txt file or a prepared folder"),
    ("an empty text", "data.path=empty.txt", "empty.txt is empty: give some text"),
    (
        "another kind of file",
        "data.path=page.html",
        "data.path=page.html is neither a .txt file nor a folder: prepare it with scripts/prepare_text.py",
    ),
    (
        "a text shorter than a sequence",
        "data.path=short.txt",
        "data.path=short.txt: its train part has 9 tokens, fewer than the 17 of one sequence of data.seq_len=16: "
        "set data.seq_len=8 or less, or give more text",
    ),
    (
        "a validation text shorter than a batch",
        "data.path=middle.txt",
        "the validation text holds 1 sequences of data.seq_len=16 tokens, fewer than one batch of train.batch_size=8: "
        "use a smaller train.batch_size or data.seq_len, or a larger data.validation_fraction "
        "(of a prepared folder: --validation-fraction)",
    ),
    (
        "more tokens than the model knows",
        "data.path=bpe",
        "data.path=bpe has a vocabulary of 260 tokens, more than model.vocab_size=256: set model.vocab_size=260",
    ),
    (
        "a folder of something else",
        "data.path=full",
        "full has no meta.json: make a folder from its text with scripts/prepare_text.py",
    ),
    (
        "a damaged meta.json",
        "data.path=bad_meta",
        "bad_meta/meta.json holds no JSON object: make the folder again with scripts/prepare_text.py",
    ),
    (
        "tokens cut short",
        "data.path=cut_tokens",
        "cut_tokens/train.bin holds 3 bytes, and meta.json says 2376 tokens × 1 bytes = 2376: "
        "make the folder again with scripts/prepare_text.py",
    ),
    (
        "tokens missing",
        "data.path=no_tokens",
        "no_tokens/validation.bin cannot be read (No such file or directory): "
        "make the folder again with scripts/prepare_text.py",
    ),
]

FILES = [
    ("a missing file", "train --config tiiny.yaml", "config file tiiny.yaml does not exist: did you mean tiny.yaml?"),
    (
        "a file in no folder",
        "train --config a/b.yaml",
        "config file a/b.yaml does not exist: name a YAML file, or the folder of a run",
    ),
    (
        "a folder without a config",
        "train --config full",
        "config file full/config.yaml does not exist: name a YAML file, or the folder of a run",
    ),
    (
        "a name too long",
        f"train --config {'x' * 300}",
        f"config file {'x' * 300} cannot be read (File name too long): name a YAML file",
    ),
    (
        "a binary file",
        "train --config binary.yaml",
        "config file binary.yaml cannot be read (it is not UTF-8 text): name a YAML file",
    ),
    (
        "another text",
        "train --config text.txt",
        "config file text.txt holds text, not sections: start it with e.g. 'model:'",
    ),
    (
        "a list",
        "train --config list.yaml",
        "config file list.yaml holds a list, not sections: start it with e.g. 'model:'",
    ),
    (
        "an open bracket",
        "train --config broken.yaml",
        "broken.yaml: expected ',' or '}', but got '<stream end>' at line 2, column 1",
    ),
    (
        "a key twice",
        "train --config twice.yaml",
        "twice.yaml: key 'steps' stands twice in the section at line 2: keep one",
    ),
    (
        "generate: a missing run",
        "generate --run runn",
        "config file runn does not exist: name a YAML file, or the folder of a run",
    ),
    (
        "generate: a config is no run",
        "generate --run tiny.yaml",
        "run tiny.yaml has no checkpoint: train it first, or name another run folder",
    ),
    ("generate: no tokens", "generate --run full --tokens 0", "--tokens=0 must be at least 1"),
    (
        "generate: a negative temperature",
        "generate --run full --temperature -1",
        "--temperature=-1.0 must be 0 or more",
    ),
    (
        "report: nothing named",
        "report",
        "nothing to report on: name the folder of a run, or --compile TARGET --config FILE",
    ),
    ("report: a missing run", "report runn", "run runn does not exist: give the folder that a run has as log.dir"),
    (
        "report: a folder of something else",
        "report full",
        "full is not a run (no metrics.jsonl in it): give the folder that a run has as log.dir",
    ),
    ("launch: no processes", "launch --processes 0", "--processes=0 must be at least 1"),
    ("launch: no such port", "launch --processes 2 --port 70000", "--port=70000 must be 1..65535"),
    (
        "prepare_text: a missing text",
        "prepare_text nowhere out",
        "nowhere does not exist: name a folder or a .txt, .jsonl or .parquet file",
    ),
    (
        "prepare_text: an empty text",
        "prepare_text empty.txt out",
        "empty.txt holds 0 characters, too few to train and validate: give more text",
    ),
    (
        "prepare_text: another encoding",
        "prepare_text latin1.txt out",
        "latin1.txt is not UTF-8 (invalid continuation byte): convert it, e.g. with iconv -f latin1 -t utf-8",
    ),
    (
        "prepare_text: another kind of file",
        "prepare_text page.html out",
        "page.html holds no .txt, .jsonl or .parquet file: convert the text to one of them",
    ),
    (
        "prepare_text: damaged JSON",
        "prepare_text broken.jsonl out",
        "broken.jsonl, line 2 is not JSON (Expecting value: line 2 column 1 (char 10)): repair or remove it",
    ),
    (
        "prepare_text: another key",
        "prepare_text other_key.jsonl out",
        "other_key.jsonl, line 1 has no 'text' but body: choose with --text-key",
    ),
    (
        "prepare_text: over other files",
        "prepare_text text.txt full",
        "full exists and is not an empty folder: name another one, or remove it",
    ),
    (
        "prepare_text: no fraction",
        "prepare_text text.txt out --validation-fraction 2",
        "--validation-fraction=2.0 must lie between 0 and 1",
    ),
    (
        "prepare_text: a vocabulary without bytes",
        "prepare_text text.txt out --tokenizer bpe --vocab-size 100",
        "--vocab-size=100 must lie in 257..1048576",
    ),
    (
        "prepare_text: verify what is cut short",
        "prepare_text cut_tokens --verify",
        "cut_tokens/train.bin holds 3 bytes, and meta.json says 2376 tokens × 1 bytes = 2376: "
        "make the folder again with scripts/prepare_text.py",
    ),
]

TRAIN = [
    (name, f"train --config tiny.yaml {words}", message) for name, words, message in CONFIG + SCHEDULE + MESH + DATA
]


@pytest.mark.parametrize(("line", "message"), cases(TRAIN + FILES))
def test_bad_input_is_one_line_and_leaves_nothing_behind(
    line: str, message: str, folder: Path, command: Command
) -> None:
    before = tree(folder)
    assert command(line) == Said(2, f"error: {message}\n")
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --config tiny.yaml --steps=3", "unrecognized arguments: --steps=3"),
        ("train --num-processes=two", "argument --num-processes: invalid int value: 'two'"),
        ("generate", "the following arguments are required: --run"),
        ("generate --run full --tokens=x", "argument --tokens: invalid int value: 'x'"),
        ("launch", "the following arguments are required: --processes"),
        ("prepare_text text.txt", "give INPUT and OUTPUT, or --verify and a folder"),
    ],
)
def test_a_wrong_flag_is_told_below_the_usage(line: str, message: str, folder: Path, command: Command) -> None:
    before = tree(folder)
    code, errors = command(line)
    assert code == 2
    assert errors.startswith("usage: ")
    assert errors.splitlines()[-1].endswith(f": error: {message}")
    assert "Traceback" not in errors
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("log_dir", "reason"),
    [
        ("file", "created (file is a file)"),
        ("file/run", "created (file is a file)"),
        ("taken", "written (Is a directory)"),
    ],
)
def test_a_log_dir_that_cannot_be_written_stops_the_run(
    log_dir: str, reason: str, folder: Path, compiled_once: None, command: Command
) -> None:
    (folder / "taken" / "config.yaml").mkdir(parents=True)
    before = tree(folder)
    message = f"log.dir={log_dir} cannot be {reason}: name another folder"
    assert command(f"train --config tiny.yaml log.dir={log_dir}") == Said(2, f"error: {message}\n")
    assert tree(folder) == before


RESUMED = [
    (
        "another model",
        "model.num_layers=2",
        "model.num_layers=2, but the checkpoints in log.dir=run have model.num_layers=1: "
        "use model.num_layers=1, or another log.dir",
    ),
    (
        "another router",
        "model.moe.gate=sigmoid",
        "model.moe.gate=sigmoid, but the checkpoints in log.dir=run have model.moe.gate=softmax: "
        "use model.moe.gate=softmax, or another log.dir",
    ),
    (
        "fewer steps than it has",
        "train.steps=3",
        "train.steps=3, but log.dir=run has a checkpoint of step 4 already: "
        "use train.steps=4 or more, or another log.dir",
    ),
    (
        "without leave to resume",
        "checkpoint.resume=false",
        "log.dir=run holds checkpoints up to step 4 and checkpoint.resume=false would overwrite them: "
        "use another log.dir, or checkpoint.resume=true",
    ),
]


@pytest.mark.parametrize(("words", "message"), cases(RESUMED))
def test_a_run_is_not_resumed_as_another(words: str, message: str, run: Path, command: Command) -> None:
    before = tree(run)
    assert command(f"train --config tiny.yaml {words}") == Said(2, f"error: {message}\n")
    assert tree(run) == before


def remove(name: str) -> Callable[[Path], object]:
    def damage(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(text)


def cut_index(run: Path) -> None:
    (index,) = (run / "checkpoints/4/state/d").iterdir()
    index.write_bytes(index.read_bytes()[:10])


def lose_newest_files_and_older_step(run: Path) -> None:
    remove("checkpoints/2")(run)
    remove("checkpoints/4/state/d")(run)


# HASH: a name that the storage layer makes up.
DAMAGED = [
    ("no state", remove("checkpoints/4/state"), "4 is damaged (state/_METADATA is missing): … go on from step 2"),
    ("no data position", remove("checkpoints/4/data"), "4 is damaged (data/metadata is missing): … go on from step 2"),
    (
        "no manifest",
        remove("checkpoints/4/state/manifest.ocdbt"),
        "4 is damaged (state/manifest.ocdbt is missing): … go on from step 2",
    ),
    (
        "no values",
        remove("checkpoints/4/state/ocdbt.process_0"),
        "4 is damaged (state/ocdbt.process_0/d/HASH is missing): … go on from step 2",
    ),
    ("an index cut short", cut_index, "4 is damaged (state/d/HASH has 10 of NUMBER bytes): … go on from step 2"),
    (
        "a cut data position",
        write("checkpoints/4/data/metadata", '{"next'),
        "4 is damaged (data/metadata: Unterminated string starting at: line 1 column 2 (char 1)): … go on from step 2",
    ),
    (
        "an empty folder",
        lambda run: (run / "checkpoints/9").mkdir(),
        "9 is damaged (state/_METADATA is missing): … go on from step 4",
    ),
    ("nothing older", lose_newest_files_and_older_step, "4 is damaged (state/d/HASH is missing): … start again"),
]


@pytest.mark.parametrize("line", ["train --config tiny.yaml train.steps=6", "generate --run run"])
@pytest.mark.parametrize(("damage", "message"), cases(DAMAGED))
def test_a_damaged_checkpoint_is_named_with_what_is_wrong(
    line: str, damage: Callable[[Path], object], message: str, run: Path, command: Command
) -> None:
    """Found before anything is restored: in orbax, each of its threads would print a stack of its own."""
    damage(run)
    before = tree(run)
    code, errors = command(line)
    pattern = re.escape(f"error: checkpoint run/checkpoints/{message}\n".replace("…", "delete that folder to"))
    assert code == 2
    assert re.fullmatch(pattern.replace("HASH", "[0-9a-f]{32}").replace("NUMBER", r"\d+"), errors)
    assert tree(run) == before


LOST_CONFIG = [
    (
        "missing",
        remove("config.yaml"),
        "config file run/config.yaml does not exist: name a YAML file, or the folder of a run",
    ),
    (
        "cut short",
        write("config.yaml", "model: {"),
        "run/config.yaml: expected the node content, but found '<stream end>' at line 1, column 9",
    ),
    (
        "of another version",
        write("config.yaml", "train: {step: 1}"),
        "unknown setting train.step: did you mean train.steps?",
    ),
]


@pytest.mark.parametrize(("damage", "reason"), cases(LOST_CONFIG))
def test_a_run_whose_config_is_lost_is_neither_resumed_nor_sampled(
    damage: Callable[[Path], object], reason: str, run: Path, command: Command
) -> None:
    damage(run)
    before = tree(run)
    assert command("generate --run run") == Said(2, f"error: {reason}\n")
    resumed = f"log.dir=run has checkpoints, but not the config of their model ({reason}): use another log.dir"
    assert command("train --config tiny.yaml") == Said(2, f"error: {resumed}\n")
    assert tree(run) == before


def test_a_file_in_the_place_of_the_checkpoints_is_no_new_run(run: Path, command: Command) -> None:
    remove("checkpoints")(run)
    write("checkpoints", "")(run)
    message = "run/checkpoints is not a folder: remove it, or use another log.dir"
    for line in ("train --config tiny.yaml", "generate --run run"):
        assert command(line) == Said(2, f"error: {message}\n")


def test_damaged_records_stop_a_resume_and_a_report(run: Path, command: Command) -> None:
    records = run / "metrics.jsonl"
    records.write_text("\0\0\0\n" + records.read_text())
    before = tree(run)
    for line in ("report run", "train --config tiny.yaml train.steps=6"):
        message = "run/metrics.jsonl line 1 is not a record of metrics: delete the line"
        assert command(line) == Said(2, f"error: {message}\n")
    assert tree(run) == before


REPORTED = [
    (
        "no records yet",
        write("metrics.jsonl", ""),
        "run run has no records yet: wait until it has trained for log.every steps",
    ),
    (
        "provenance cut short",
        write("provenance.json", "{"),
        "run/provenance.json is not a JSON object: delete the file, the report does without it",
    ),
    (
        "a page that cannot be written",
        lambda run: (run / "report.html").mkdir(),
        "run/report.html cannot be written (Is a directory): make the folder writable",
    ),
]


@pytest.mark.parametrize(("damage", "message"), cases(REPORTED))
def test_a_run_that_cannot_be_reported_on(
    damage: Callable[[Path], object], message: str, run: Path, command: Command
) -> None:
    damage(run)
    before = tree(run)
    assert command("report run") == Said(2, f"error: {message}\n")
    assert tree(run) == before


SAMPLED = [
    (
        "an empty prompt",
        "text.txt",
        "--prompt ''",
        "the prompt is empty: give at least one character, e.g. a line break",
    ),
    (
        "the text is gone, and with it the tokenizer",
        "gone/text.txt",
        "",
        "data.path=gone/text.txt does not exist: name a .txt file or a prepared folder",
    ),
    (
        "the tokenizer is gone",
        "no_tokenizer",
        "",
        "no_tokenizer/tokenizer.json is no tokenizer (No such file or directory (os error 2)): make the folder again",
    ),
]


@pytest.mark.parametrize(("data", "words", "message"), cases(SAMPLED))
def test_a_run_that_cannot_be_sampled(data: str, words: str, message: str, run: Path, command: Command) -> None:
    saved = run / "config.yaml"
    saved.write_text(saved.read_text().replace("path: text.txt", f"path: {data}"))
    before = tree(run)
    assert command(f"generate --run run {words}") == Said(2, f"error: {message}\n")
    assert tree(run) == before


def test_a_run_without_a_checkpoint_has_nothing_to_sample(run: Path, command: Command) -> None:
    remove("checkpoints")(run)
    message = "run run has no checkpoint: train it first, or name another run folder"
    assert command("generate --run run") == Said(2, f"error: {message}\n")


def test_the_run_of_these_cases_can_be_resumed_and_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the cases above might be refused for a reason of their own."""
    for line in ("train --config tiny.yaml train.steps=6", "report run"):
        name, *arguments = line.split()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        run_command(COMMANDS[name])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 4, 6]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["4", "6"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-m", "moe_jax.train", "--config", "tiny.yaml", "mesh.cpu_devices=6", "mesh.data=4"],
            "mesh: data=4 × expert=1 = 4, but there are 6 devices: use mesh.data=6 or mesh.data=-1",
        ),
        (
            ["-m", "moe_jax.launch", "--processes", "2", "--config", "tiny.yaml", "mesh.cpu_devices=3"],
            "mesh.cpu_devices=3 is not divisible by 2 processes (each simulates an equal share): "
            "set mesh.cpu_devices=2 or 4",
        ),
        (
            [str(ROOT / "scripts" / "prepare_text.py"), "nowhere", "out"],
            "nowhere does not exist: name a folder or a .txt, .jsonl or .parquet file",
        ),
    ],
)
def test_a_real_process_says_the_same(arguments: list[str], message: str, folder: Path) -> None:
    before = tree(folder)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")
    assert tree(folder) == before
