"""Run every command of README.md and docs/ as it is written there. python profiling/docs_commands.py

Copies the committed tree and runs the shell commands of the pages' code blocks in the copy: README.md first, then the
pages in the order of docs/pages.md. A page that clones the project gets a new copy, which the pages after it use as
well. A training run that takes longer than --limit seconds gets a SIGTERM, at which it saves a checkpoint and ends; so
does `report --watch`, which ends no other way. A command is skipped if this machine lacks something that it needs:
NEEDS below lists these requirements and their tests.

Writes results/docs_commands.json; with --pages only the results of those pages. Exit code 1 if a command failed. Takes
two hours or more on two idle cores.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from count_argument import check_least
from results_file import RESULTS, write_result

from moe_jax.errors import CommandParser, ConfigError, run_command

ROOT = Path(__file__).resolve().parents[1]
RESULT = RESULTS / "docs_commands.json"

# Files of the reader's own that a page's commands read, made from files of the project before the page's first command.
READERS_OWN = {
    "data.md": "mkdir -p my_texts && cp configs/text/shakespeare.txt my.txt && cp my.txt my_texts/ && "
    'for n in $(seq 8000); do echo "{\\"prompt\\": \\"$n + 1 = \\", \\"completion\\": \\"$((n + 1))\\"}"; done '
    "> chats.jsonl && python -c \"import json; texts = open('my.txt').read().split('\\n\\n'); "
    "print('\\n'.join(json.dumps({'text': text}) for text in texts))\" > corpus.jsonl",
    "generate.md": """echo '{"prompt": "ROMEO:"}' > prompts.jsonl""",
    "evaluate.md": "cp configs/text/shakespeare.txt my.txt && mkdir -p my_tasks && "
    """echo '{"text": "To be, or not to be"}' > corpus.jsonl && """
    """echo '{"question": "To be, or", "choices": [" not to be", "xqzv"], "answer": 0}' > my_tasks/lines.jsonl && """
    "sed -n '/^# my_tasks/,/^```/{/^```/!p}' docs/evaluate.md > my_tasks/lines.yaml",
    "convert.md": "mkdir -p models && cp -r tests/golden/olmoe models/olmoe",
}


class Need(NamedTuple):
    """A requirement of commands that machines may lack."""

    pattern: str  # matches the commands that need it
    reason: str
    test: str  # a shell line that succeeds if it is available


NEEDS = (
    Need(r" --tasks ", "lm-eval, of the extra eval", "python -c 'import lm_eval'"),
    Need(r"\b(ADDRESS|NAME|ZONE|FOLDER)\b", "a name of the reader's own", "false"),
    Need(r"=…|export MOE_JAX_TOKEN", "a secret of the reader's own", "false"),
    Need(r"test\.sh", "the time of the whole suite: continuous integration runs this line", "false"),
    Need(r"^sudo ", "root by sudo, for network namespaces", "command -v sudo"),
    Need(r"10\.0\.0\.1", "several hosts, this one with the address 10.0.0.1", "hostname -I | grep -w 10.0.0.1"),
    Need(r"\b(gs|s3)://", "a bucket of the reader's own", "false"),
    Need(r"\bsbatch ", "SLURM", "command -v sbatch"),
    Need(r"^docker ", "a Docker daemon", "docker info"),
    Need(r"runs/olmoe .*--chat", "a published model's tokenizer and chat template", "false"),
    Need(r"^tensorboard ", "TensorBoard", "command -v tensorboard"),
    Need(r"bench_gpu\.py$|gpu_day\.sh$", "a GPU", "nvidia-smi"),
    Need(r"--compile v5p", "libtpu", "python -c 'import libtpu'"),
    Need(r"--compile h|memory_check", "jax's CUDA plugin", "python -c 'import jax_plugins.xla_cuda13'"),
    Need(
        r"^(?!.*cpu_devices=8).*mesh\.expert=8|runs/finetuned",
        "8 accelerators",
        "python -c 'import jax; assert jax.device_count() >= 8'",
    ),
)


class Command(NamedTuple):
    """A line of a code block."""

    page: str
    line: str  # as written, without its comment
    shown: str  # the line below it, in blocks that show output

    @property
    def typed(self) -> str:
        """The line without bracketed words, which stand for optional settings."""
        return re.sub(r" \[section\.key=value …\]", "", self.line)

    @property
    def need(self) -> Need | None:
        """The first requirement of this command, or None."""
        return next((need for need in NEEDS if re.search(need.pattern, self.line)), None)


def pages() -> list[Path]:
    """Return README.md, the list of pages, and the other pages in its order."""
    listed = ROOT / "docs" / "pages.md"
    names = re.findall(r"^\| .* \| \[.*\]\((\w+\.md)\) \|$", listed.read_text(), re.MULTILINE)
    return [ROOT / "README.md", listed, *(listed.with_name(name) for name in names)]


def commands_of(page: Path) -> Iterator[Command]:
    """Yield the shell commands of a page's code blocks; of blocks that show output, only this project's commands."""
    for language, content in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        if language not in ("", "sh"):
            continue
        lines = re.sub(r" *\\\n *", " ", content).splitlines()
        for line, shown in zip(lines, [*lines[1:], ""], strict=True):
            if language == "sh" or re.match(r"(\$ )?python |tensorboard ", line):
                yield Command(page.name, _without_comment(line), shown)


def _without_comment(line: str) -> str:
    return re.sub(r"\s+#.*", "", line).removeprefix("$ ").strip()


def main() -> None:
    """Run all commands and write the result."""
    parser = CommandParser(prog="python profiling/docs_commands.py", description=__doc__)
    parser.add_argument("--limit", type=int, default=3600, help="seconds of a training run (default: %(default)s)")
    parser.add_argument("--pages", nargs="+", metavar="PAGE", help="run only these, e.g. README.md data.md")
    arguments = parser.parse_args()
    check_least(arguments, limit=1)
    names = [page.name for page in pages()]
    if unknown := set(arguments.pages or ()) - set(names):
        raise ConfigError(f"--pages={min(unknown)} is unknown: choose of {', '.join(names)}")
    found = {}
    if arguments.pages and RESULT.exists():
        found = json.loads(RESULT.read_text())["pages"]
    chosen = [page for page in pages() if page.name in (arguments.pages or names)]
    with tempfile.TemporaryDirectory() as folder:
        for page in chosen:
            if page == chosen[0] or any("git clone" in command.line for command in commands_of(page)):
                copy = _copied_tree(Path(folder) / page.stem)
            if commands := list(_run_page(page, copy, arguments.limit)):
                found[page.name] = {**_versions(copy), "commands": commands}
                _write({name: found[name] for name in names if name in found})
    failed = [run for page in found.values() for run in page["commands"] if run["outcome"] == "failed"]
    if failed:
        sys.exit(f"failed: {', '.join(run['command'] for run in failed)}")


def _write(found: dict[str, Any]) -> None:
    """Write the results after each page, so that an interrupted run loses no earlier page."""
    counts = Counter(run["outcome"] for page in found.values() for run in page["commands"])
    write_result(RESULT.stem, {"counts": dict(counts), "pages": found})


def _copied_tree(copy: Path) -> Path:
    """Copy the committed files into a new folder."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(copy, filter="data")
    return copy


def _versions(copy: Path) -> dict[str, Any]:
    """Return the date and versions; the copy may have its own environment."""
    origin = "import json; from moe_jax.measure.provenance import origin; print(json.dumps(origin()))"
    _, output, _ = _bash(f"python -c {shlex.quote(origin)}", copy, 120)
    return {name: value for name, value in json.loads(output).items() if name in ("date", "python", "jax")}


def _run_page(page: Path, copy: Path, limit: int) -> Iterator[dict[str, Any]]:
    if page.name in READERS_OWN:
        subprocess.run(READERS_OWN[page.name], shell=True, check=True, cwd=copy)
    for name, code in re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", page.read_text(), re.DOTALL):
        (copy / name).write_text(code)
    for command in commands_of(page):
        print(f"{command.page}: {command.typed}", file=sys.stderr)
        run = {"command": command.line, **_outcome(command, copy, limit)}
        print(f"  {run['outcome']} {run.get('why', '')}", file=sys.stderr)
        yield run


def _outcome(command: Command, copy: Path, limit: int) -> dict[str, Any]:
    if (need := command.need) and _bash(need.test, copy, 120)[0] != 0:
        return {"outcome": "needs", "why": need.reason}
    start = time.monotonic()
    watches = " --watch " in command.typed  # until it is stopped, which it has no exit code for
    trains = re.search(r"python -m moe_jax\.(train|launch)", command.typed) and "--dry-run" not in command.typed
    code, output, stopped = _bash(command.typed, copy, limit if trains or watches else 3600)
    outcome: dict[str, Any] = {"seconds": round(time.monotonic() - start)}
    wanted = 2 if command.shown.startswith("error: ") else -signal.SIGTERM if watches and stopped else 0
    if code != wanted or (wanted == 2 and output.strip() != command.shown):
        return outcome | {"outcome": "failed", "why": f"exit code {code}: {output.strip()[-600:]}"}
    return outcome | ({"outcome": "stopped", "why": f"after {limit} s, as asked"} if stopped else {"outcome": "ran"})


def _bash(line: str, copy: Path, limit: int) -> tuple[int, str, bool]:
    """Run a line in bash; return the exit code, the output, and whether it had to be stopped."""
    environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    enter = "if [[ -f .venv/bin/activate ]]; then source .venv/bin/activate; fi; "
    command = ["bash", "-c", enter + line]
    with subprocess.Popen(
        command, cwd=copy, env=environ, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            for stop in (None, signal.SIGTERM, signal.SIGKILL):
                if stop:
                    os.killpg(process.pid, stop)
                try:
                    output, _ = process.communicate(timeout=300 if stop else limit)
                    return process.returncode, output, stop is not None
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:  # Ctrl-C reaches this process alone
            os.killpg(process.pid, signal.SIGKILL)
            raise
    raise RuntimeError(f"{shlex.join(command)} does not end")


if __name__ == "__main__":
    run_command(main)
