"""Launchers of services that are not here: what they would run is right, as far as a machine without them can check."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_docs import check_command

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
SETTINGS = ["--config", "configs/shakespeare_cpu.yaml", "train.steps=7", "log.sample_prompt=two words, 'quoted'"]


def bash(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(["bash", *words], capture_output=True, text=True, cwd=ROOT, env=inherited | environ)


def dry_run(script: str, *words: str, **environ: str) -> list[str]:
    """The command that a script would run."""
    done = bash(f"scripts/{script}", "--dry-run", *words, **environ)
    assert (done.returncode, done.stderr) == (0, "")
    return shlex.split(done.stdout)


@pytest.mark.parametrize("script", [*sorted(SCRIPTS.glob("*.sh")), SCRIPTS / "slurm.sbatch"], ids=lambda p: p.name)
def test_bash_can_read_it(script: Path) -> None:
    assert bash("-n", str(script)).stderr == ""


def test_a_tpus_workers_get_the_command_of_one_worker() -> None:
    """Quoted twice on its way."""
    gcloud, (command,) = (
        (words := dry_run("tpu_vm.sh", "--on", "v5p", "--zone", "us-east5-a", *SETTINGS))[:-1],
        words[-1:],
    )
    assert gcloud == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "v5p", "--zone=us-east5-a", "--worker=all"]
    there = shlex.split(command.removeprefix("--command="))
    assert there[:4] == ["cd", "moe_jax", "&&", "scripts/tpu_vm.sh"]
    assert there[4:] == SETTINGS
    assert dry_run("tpu_vm.sh", *there[4:]) == ["python", "-m", "moe_jax.train", *SETTINGS]
    check_command("train", SETTINGS)


@pytest.mark.parametrize("words", [["--on"], ["--on", "v5p"], ["--on", "v5p", "us-east5-a"], ["--on", "v5p", "--zone"]])
def test_a_tpu_without_its_zone_is_refused(words: list[str]) -> None:
    done = bash("scripts/tpu_vm.sh", "--dry-run", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: --on needs the TPU's name, its zone and what to train: "
        "use scripts/tpu_vm.sh --on NAME --zone ZONE --config FILE\n"
    )


@pytest.mark.parametrize(
    ("environ", "processes"), [({}, "8"), ({"SLURM_GPUS_ON_NODE": "4"}, "4"), ({"PROCESSES": "2"}, "2")]
)
def test_a_slurm_node_gets_one_launcher(environ: dict[str, str], processes: str) -> None:
    words = dry_run("slurm.sbatch", *SETTINGS, **environ)
    assert words[:3] == ["srun", "--cpus-per-task=64", "--kill-on-bad-exit=1"]
    start = words.index("moe_jax.launch") + 1
    assert words[3:start] == ["python", "-m", "moe_jax.launch"]
    launch = ["--processes", processes, "--rendezvous", "FIRST_NODE:8475", "--grace", "100"]
    assert words[start:] == [*launch, *SETTINGS]
    check_command("launch", words[start:])


@pytest.fixture
def jobset() -> dict[str, Any]:
    return yaml.safe_load((SCRIPTS / "gke.yaml").read_text())


def test_a_jobset_has_what_it_must_have(jobset: dict[str, Any]) -> None:
    """Fields of jobset.x-k8s.io/v1alpha2 and batch/v1, and no misspelt one where this file has some."""
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"].keys() == {"network", "failurePolicy", "replicatedJobs"}
    assert jobset["spec"]["network"].keys() == {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}
    (job,) = jobset["spec"]["replicatedJobs"]
    assert job.keys() == {"name", "replicas", "template"}
    spec = job["template"]["spec"]
    assert spec.keys() == {"parallelism", "completions", "backoffLimit", "template"}
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] in ("Never", "OnFailure"), "a Job's pods know no other"
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_a_jobsets_pods_find_the_first_one(jobset: dict[str, Any]) -> None:
    """All hosts are waited for, by the name that JobSet gives pod 0."""
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (script,) = container["args"]
    words = shlex.split(script.replace("$JOB_COMPLETION_INDEX", "3"))
    assert words[:4] == ["exec", "python", "-m", "moe_jax.train"]
    check_command("train", words[4:])
    given = dict(re.findall(r"--([\w-]+) (\S+)", script))
    host, _, port = given["coordinator"].partition(":")
    network = jobset["spec"]["network"]
    assert network["enableDNSHostnames"]
    assert host == f"{jobset['metadata']['name']}-{job['name']}-0-0.{network['subdomain']}"
    assert int(given["num-processes"]) == spec["parallelism"] == spec["completions"]
    (bind,) = (each["value"] for each in container["env"] if each["name"] == "JAX_COORDINATOR_BIND_ADDRESS")
    assert bind == f"0.0.0.0:{port}"
    assert container["ports"] == [{"containerPort": int(port)}]


def test_the_image_holds_what_is_needed_and_runs_without_privileges() -> None:
    lines = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    copied = [name for step, words in steps if step == "COPY" for name in words.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(kept)
    users = [words for step, words in steps if step == "USER"]
    assert users == ["trainer"]
    entry = next(words for step, words in steps if step == "ENTRYPOINT")
    assert entry == '["python", "-m", "moe_jax.train"]'


def test_a_smoke_run_without_a_newer_python_fails(tmp_path: Path) -> None:
    """And says so: nothing is passed over silently."""
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "")
    done = subprocess.run(
        [shutil.which("bash") or "", SCRIPTS / "smoke.sh"],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no Python 3.13 or 3.12 found")


def test_continuous_integration_runs_both() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in lines if "scripts/" in line] == [
        "bash scripts/test.sh </dev/null",
        "bash scripts/smoke.sh </dev/null",
    ]
