"""Flags that a command does not have or cannot use, and what its own process says."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_jax.plan.clusters import PRESETS
from tests.bad_input.cases import ROOT, Command, Refusal, Said, cases, tree

LAUNCHED = [
    ("launch: no processes", "launch --processes 0", "--processes=0 must be at least 1"),
    ("launch: less than no time", "launch --processes 2 --grace -1", "--grace=-1.0 must be at least 0"),
    *(
        (
            f"launch: no such module: {name}",
            f"launch --processes 2 --module {name}",
            f"--module={name} is not found: name what python -m can run, e.g. moe_jax.train",
        )
        for name in ("nothere", "not.here", "moe_jax.nothere")
    ),
    ("launch: no such port", "launch --processes 2 --port 70000", "--port=70000 must be 1..65520"),
    ("launch: less than no tries", "launch --processes 2 --retries -1", "--retries=-1 must be at least 0"),
    (
        "launch: more than all",
        "launch --processes 2 --min-processes 3",
        "--min-processes=3 must be 1..2 (--processes)",
    ),
    (
        "launch: no time for a step",
        "launch --processes 2 --progress-timeout 0",
        "--progress-timeout=0.0 must be above 0",
    ),
    (
        "launch: no time to start",
        "launch --processes 2 --start-timeout nan",
        "--start-timeout=nan must be a finite number",
    ),
]


TWO_HOSTS = "launch --processes 2 --hosts 2"
ON_SEVERAL_HOSTS = [
    ("launch: no hosts", "launch --processes 2 --hosts 0", "--hosts=0 must be at least 1"),
    ("launch: which host", TWO_HOSTS, "--hosts=2 also needs --host, this one's number in 0..1"),
    ("launch: no such host", f"{TWO_HOSTS} --host 2", "--host=2 must be 0..1 with --hosts=2"),
    ("launch: more than all hosts", f"{TWO_HOSTS} --host 1 --min-hosts 3", "--min-hosts=3 must be 1..2 (--hosts)"),
    (
        "launch: no time for hosts",
        f"{TWO_HOSTS} --host 1 --host-timeout 0",
        "--host-timeout=0.0 must be above 0",
    ),
    (
        "launch: hosts that meet nowhere",
        f"{TWO_HOSTS} --host 1",
        "--hosts=2 also needs --rendezvous, an address of host 0 and a port, e.g. 10.0.0.1:8475",
    ),
    *(
        (
            f"launch: hosts that meet at {address}",
            f"{TWO_HOSTS} --host 1 --rendezvous {address}",
            f"--rendezvous={address} must be HOST:PORT with a port in 1..65519, e.g. 10.0.0.1:8475",
        )
        for address in (
            *("10.0.0.1", "10.0.0.1:65520", "10.0.0.1:", ":8475", "10.0.0.1:8475:1", "10.0.0.256:8475", "10.0.1:8475"),
            *("http://10.0.0.1:8475", "::1:8475", "[::1:8475", "[10.0.0.1]:8475", "10.0.0.1,10.0.0.2:8475"),
        )
    ),
    (
        "launch: a port of one host",
        f"{TWO_HOSTS} --host 1 --rendezvous h:8475 --port 4242",
        "--port=4242 is for one host: with --hosts=2, processes meet on the 16 ports after that of --rendezvous",
    ),
    (
        "launch: hosts without a secret",
        f"{TWO_HOSTS} --host 1 --rendezvous h:8475",
        "MOE_JAX_TOKEN has 0 characters and needs 16: set it to the same secret on all hosts, made once by "
        "python -c 'import secrets; print(secrets.token_hex())'",
    ),
]


@pytest.mark.parametrize(("line", "message"), cases(LAUNCHED + ON_SEVERAL_HOSTS))
def test_processes_that_cannot_be_launched(line: str, message: str, assert_refused: Refusal) -> None:
    assert_refused(line, message)


MEASURED = [
    (
        "measure: an unknown kind",
        "measure --only copy,matmull",
        "--only=matmull is unknown: choose of collectives, matmul, attention, copy",
    ),
    ("measure: no rounds", "measure --rounds 0", "--rounds=0 must be at least 1"),
    ("measure: no devices", "measure --cpu-devices 0", "--cpu-devices=0 must be at least 1"),
    ("measure: empty nodes", "measure --node-devices 0", "--node-devices=0 must be at least 1"),
    (
        "measure: another kind of file",
        "measure --out profile.yaml",
        "--out=profile.yaml must be a file that ends in .json, e.g. cluster_profile.json",
    ),
    (
        "measure: a file in the way",
        "measure --out file/profile.json",
        "file: Not a directory: name another file or folder",
    ),
]


@pytest.mark.parametrize(("line", "message"), cases(MEASURED))
def test_what_cannot_be_measured(line: str, message: str, assert_refused: Refusal) -> None:
    assert_refused(line, message)


PLANNED = [
    (
        "plan: an unknown cluster",
        "plan --model tiny.yaml --cluster h10x8",
        "cluster 'h10x8' is unknown: did you mean h100-8?",
    ),
    (
        "plan: a folder for a cluster",
        "plan --model tiny.yaml --cluster /tmp",
        f"cluster '/tmp' is unknown: use one of {', '.join(PRESETS)}, as in h100x64, the .json file of a measured "
        "profile, or a .yaml file that describes one (docs/plan.md)",
    ),
    (
        "plan: more devices than there are",
        f"plan --model tiny.yaml --cluster h100x1{'0' * 27}",
        f"cluster h100x1{'0' * 27} has too many devices: use up to 1,048,576",
    ),
    (
        "plan: a load below the mean",
        "plan --model tiny.yaml --cluster h100x8 --load-factor 0.5",
        "--load-factor=0.5 must be at least 1",
    ),
    (
        "plan: a negative price",
        "plan --model tiny.yaml --cluster h100x8 --dollars-per-hour -2",
        "--dollars-per-hour=-2.0 must be at least 0",
    ),
    (
        "plan: two clusters",
        "plan --model tiny.yaml --cluster h100x64 plan.cluster=v5p-64",
        "plan.cluster=v5p-64 contradicts --cluster h100x64: use plan.cluster=null",
    ),
    (
        "plan: an empty name of a config",
        "plan --model '' --cluster h100x8",
        "--model '' names no config: name a YAML file, e.g. configs/models/mixtral_8x7b.yaml",
    ),
    *(
        (
            f"plan: a config without a model: {name}",
            f"plan --model {name} --cluster h100x8 train.batch_size=8",
            f"--model {name} sets nothing of the model: name a config with a model section, e.g. "
            "configs/models/mixtral_8x7b.yaml",
        )
        for name in ("nothing.yaml", "only_steps.yaml")
    ),
    (
        "plan: half a node",
        "plan --model tiny.yaml --cluster h100x12",
        "cluster h100x12: 12 devices are no whole nodes of 8: use 8 or 16",
    ),
    (
        "plan: no such profile",
        "plan --model tiny.yaml --cluster no.json",
        "cluster profile no.json cannot be read (No such file or directory): make one with python -m moe_jax.measure",
    ),
    (
        "plan: no config",
        "plan --model tiny.yaml --cluster h100x8 --out plan.txt",
        "--out plan.txt is to be a config: name a .yaml file",
    ),
    (
        "plan: a batch that feeds no mesh",
        "plan --model tiny.yaml --cluster h100x8 train.batch_size=3 data.seq_len=15",
        "nothing trains on h100x8 (data=8: train.batch_size=3 is not divisible by train.grad_accumulation=1 × "
        "8 devices (data × expert) = 8: use 8)",
    ),
]


@pytest.mark.parametrize(("line", "message"), cases(PLANNED))
def test_what_cannot_be_planned(line: str, message: str, assert_refused: Refusal) -> None:
    assert_refused(line, message)


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("/proc/none/plan.yaml", "/proc/none: No such file or directory"),
        ("file/plan.yaml", "file: Not a directory"),
        ("folder.yaml", "folder.yaml: Is a directory"),
        ("told.yaml", "told.txt: Is a directory"),
        (f"new/{'n' * 300}.yaml", f"new/{'n' * 300}.yaml: File name too long"),
    ],
)
def test_a_plan_that_could_not_be_written_is_not_made(
    out: str, reason: str, assert_refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("moe_jax.cli.plan.plan")
    line = f"plan --model tiny.yaml --cluster h100x8 --out {out}"
    assert_refused(line, f"--out {out} cannot be written ({reason}): name another file")


def test_a_plan_replaces_no_file_of_another_kind(assert_refused: Refusal) -> None:
    line = "plan --model tiny.yaml --cluster h100x8 --out"
    assert_refused(f"{line} ./tiny.yaml", "--out tiny.yaml would replace --model tiny.yaml: name another file")
    assert_refused(
        f"{line} text.yaml", "--out text.yaml would replace text.txt, which no plan has written: name another file"
    )


def test_a_disk_that_fills_up_is_reported_with_the_name_of_the_file(
    assert_refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("moe_jax.files.atomic.os.fsync", full)
    assert_refused(
        "plan --model tiny.yaml --cluster h100x8 --out new/plan.yaml",
        "--out new/plan.yaml cannot be written (new/plan.yaml: No space left on device): name another file",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --config tiny.yaml --steps=3", "unrecognized arguments: --steps=3"),
        ("train --num-processes=two", "argument --num-processes: invalid int value: 'two'"),
        ("generate", "the following arguments are required: --run"),
        ("evaluate", "the following arguments are required: RUN"),
        ("evaluate run --batches=x", "argument --batches: invalid int value: 'x'"),
        ("generate --run full --tokens=x", "argument --tokens: invalid int value: 'x'"),
        ("launch", "the following arguments are required: --processes"),
        ("train --config ''", "argument --config: '' names no file or folder"),
        ("measure --out ''", "argument --out: '' names no file or folder"),
        ("generate --run ''", "argument --run: '' names no file or folder"),
        ("report run --save-hlo=", "argument --save-hlo: '' names no file or folder"),
        ("prepare_text text.txt", "give INPUT and OUTPUT, or --verify and a folder"),
    ],
)
def test_a_wrong_flag_is_reported_with_the_command_that_lists_them(
    line: str, message: str, assert_refused: Refusal
) -> None:
    name = line.split()[0]
    program = f"scripts/{name}.py" if name == "prepare_text" else f"-m moe_jax.{name}"
    assert_refused(line, f"{message}: see python {program} --help")


def test_an_interrupted_command_reports_it(folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_jax.cli.plan.plan", interrupt)
    assert command("plan --model tiny.yaml --cluster h100x8") == Said(130, "stopped: interrupted\n")


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
            ["-m", "moe_jax.measure", "--cpu-devices", "4", "--node-devices", "3"],
            "--node-devices=3 does not divide the 4 devices: use 1, 2, 4",
        ),
        (
            ["-m", "moe_jax.measure", "--cpu-devices", "1", "--only", "collectives"],
            "--only=collectives has nothing to measure on one device: add others, or --cpu-devices",
        ),
        (
            [str(ROOT / "scripts" / "prepare_text.py"), "nowhere", "out"],
            "nowhere does not exist: name a folder or a .txt, .jsonl, .json, .parquet, .arrow or .array_record file",
        ),
    ],
)
def test_a_real_process_prints_the_same(arguments: list[str], message: str, folder: Path) -> None:
    before = tree(folder)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("unbuffered", "place"), [("", "standard output"), ("1", "a file or standard output")], ids=["buffered", "plain"]
)
def test_output_on_a_full_disk_is_reported(unbuffered: str, place: str, folder: Path) -> None:
    """In one line: Python would print two more for what it still has to write."""
    line = [sys.executable, str(ROOT / "scripts" / "prepare_text.py"), "--verify", "tokens"]
    with open("/dev/full", "w") as full:
        env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(line, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    message = f"error: {place}: No space left on device: free some space on that disk\n"
    assert (done.returncode, done.stderr) == (2, message)
