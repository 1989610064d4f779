"""The shell commands of README.md and docs/: `profiling/docs_commands.py` runs them as they are written, at night; here
each is read by its program, and training runs by those whose folder they would resume in."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from moe_jax.checkpoint.compatibility import check_same_run
from moe_jax.config.draft import Draft
from moe_jax.config.yaml_io import load_config, load_draft, to_yaml
from moe_jax.errors import UserError
from tests.results import result
from tests.test_docs import CONFIG, PAGES, ROOT, arguments_of, check_command, prose

sys.path.insert(0, str(ROOT / "profiling"))  # its programs find each other there

import docs_commands
from docs_commands import Command, commands_of, pages
from results_file import RESULTS

COMMANDS = [command for page in pages() for command in commands_of(page)]
PROGRAMS = (
    r"(bash )?scripts/\w+\.sh|(CALLS=1 )?profiling/gpu_day\.sh|EXTRAS=\S+ PROCESSES=2 sbatch|sbatch|docker|git clone|"
    r"tensorboard|python3(\.12)? -m venv"
)
INSTALL = r"(FOLDER/bin/)?pip install"
TOKEN = "export MOE_JAX_TOKEN=…"


def words_of(line: str) -> tuple[str, list[str]] | None:
    """Name and arguments, if it calls a module or a program of the project."""
    if not (
        call := re.match(
            r"(?:sudo )?(?:\.venv/bin/)?python (?:-m moe_jax\.(\w+)|(?:profiling|scripts)/(\w+)\.py)", line
        )
    ):
        return None
    line = line[call.end() :].replace("--config FILE", f"--config {CONFIG}")
    line = re.sub(r"(?<= )\[([^\]]*)\]", r"\1", line)  # may be left out
    return call[1] or call[2], shlex.split(line)


def test_the_nightly_run_reads_every_page() -> None:
    assert sorted(pages()) == sorted(PAGES)
    assert len(COMMANDS) > 70


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_command_is_read_by_its_program(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or refused with what the page shows. One of another program must be named above."""
    monkeypatch.chdir(ROOT)
    for command in commands_of(page):
        if (words := words_of(command.typed)) is None:
            assert re.match(rf"({PROGRAMS}|{INSTALL}|{TOKEN})", command.line), command.line
            continue
        reported = ""
        try:
            check_command(*words)
        except UserError as error:
            reported = f"error: {error}"
        except SystemExit as end:
            reported = f"exit code {end.code}"
        assert reported == (command.shown if command.shown.startswith("error: ") else ""), command.line


def test_commands_in_sentences_are_read_by_their_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with arguments and without words that stand for others. A program of profiling/ has left a result."""
    monkeypatch.chdir(ROOT)
    files = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    ran = {file["provenance"]["command"].split()[1] for file in files if "provenance" in file}
    lines = [line for page in pages() for line in re.findall(r"`(python [^`]+)`", prose(page))]
    for line in lines:
        program, words = words_of(line) or ("", [])
        if words and not re.search(r"…|\b(RUN|PYTHON|TARGET|N)\b|--compile$", line):
            check_command(program, words)
        if line.startswith("python profiling/"):
            assert line.split()[1] in ran, line
    assert len(lines) > 15


def test_what_is_written_out_leaves_nothing_open() -> None:
    """A command with a word that stands for another cannot be run, and NEEDS has to list it."""
    stands_for_another = r"…|\b(FILE|RUN|PYTHON|TARGET|ADDRESS|NAME|ZONE|FOLDER)\b"
    open_commands = [command for command in COMMANDS if re.search(stands_for_another, command.typed)]
    assert not [command.line for command in open_commands if command.need is None]


def test_all_needs_are_of_commands() -> None:
    for need in docs_commands.NEEDS:
        assert [command for command in COMMANDS if command.need == need], need


def test_the_suite_is_run_by_continuous_integration() -> None:
    """So that the nightly run need not."""
    (command,) = [command for command in COMMANDS if "test.sh" in command.line]
    assert command.line in (ROOT / ".ci/run").read_text()


def draft_of(command: Command) -> Draft | None:
    """The settings of a run that a command begins or resumes, if its config is there."""
    program, words = words_of(command.typed) or ("", [])
    if program == "launch" and "--module" not in words:
        program, words = "train", arguments_of(program, words)[1]
    if program != "train" or command.shown.startswith("error: "):
        return None
    arguments, _ = arguments_of("train", words)
    if arguments.dry_run or not Path(arguments.config).exists():
        return None
    return load_draft(arguments.config, arguments.overrides)


def test_no_run_is_refused_after_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page after those before it: what is in a folder is this model's, with this data, and has no more steps."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    begun = 0
    for page in pages():
        if any("git clone" in command.line for command in commands_of(page)):
            shutil.rmtree("runs")
        for command in commands_of(page):
            if (draft := draft_of(command)) is None:
                continue
            saved = Path(draft.log.dir) / "config.yaml"
            if draft.open:  # what the planner chooses, another run cannot resume
                assert not saved.exists(), command.line
                continue
            config = draft.choose()
            if saved.exists():
                check_same_run(config, saved.parent)
                assert load_config(saved).train.steps <= config.train.steps, command.line
            saved.parent.mkdir(parents=True, exist_ok=True)
            saved.write_text(to_yaml(config))
            begun += 1
    assert begun > 15


def test_no_command_failed_when_they_were_run_last() -> None:
    """What needs something is no failure, and has the reason."""
    found = [run for page in result("docs_commands")["pages"].values() for run in page["commands"]]
    assert not [run for run in found if run["outcome"] == "failed"]
    assert {run["outcome"] for run in found} <= {"ran", "stopped", "needs"}
    reasons = {need.reason for need in docs_commands.NEEDS}
    assert all(run["why"] in reasons for run in found if run["outcome"] == "needs")


def test_an_error_that_is_shown_is_the_one_that_comes(tmp_path: Path) -> None:
    """Exit code 2 and the very line, or the nightly run fails."""
    for shown, outcome in (("error: no", "ran"), ("error: yes", "failed"), ("", "failed")):
        command = Command("page.md", "echo error: no; exit 2", shown)
        assert docs_commands._outcome(command, tmp_path, 60)["outcome"] == outcome
