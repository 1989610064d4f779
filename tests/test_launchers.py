"""Launchers of services that are not here: what they would run is right, as far as a machine without them can check."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import types
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


@pytest.mark.parametrize("script", sorted([*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch")]), ids=lambda p: p.name)
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


def test_components_of_a_slurm_job_number_their_processes_one_after_another(tmp_path: Path) -> None:
    """One node in the first component and two in the second, as each task of a step sees itself."""
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"')
    (tmp_path / "python").chmod(0o755)
    done = bash("scripts/slurm_het.sbatch", "--dry-run", *SETTINGS)
    assert (done.returncode, done.stderr) == (0, "")
    steps = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [step[:3] for step in steps] == [["srun", f"--het-group={n}", "--kill-on-bad-exit=1"] for n in (0, 1)]
    ids = []
    for step, tasks in zip(steps, (1, 2), strict=True):
        for task in range(tasks):
            seen = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_PROCID": str(task)}
            words = bash(*step[4:], **seen).stdout.splitlines()
            assert words[:4] == ["-m", "moe_jax.train", "--coordinator", "NODE_0:8476"]
            assert words[4:6] == ["--num-processes", "3"]
            assert words[8:] == SETTINGS
            check_command("train", words[2:])
            ids.append(words[7])
    assert ids == ["0", "1", "2"]


def test_a_failed_slurm_job_is_queued_again_unless_its_settings_are_wrong(tmp_path: Path) -> None:
    """With SLURM's commands replaced by others, which print what they are asked."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup_env.sh").write_text("")
    for name, body in (("srun", 'exit "$CODE"'), ("scontrol", 'if [ "$1" = show ]; then echo a; else echo "$@"; fi')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_HET_SIZE": "2", "SLURM_JOB_ID": "7"}
    slurm |= {f"SLURM_JOB_NODELIST_HET_GROUP_{n}": "a" for n in (0, 1)}
    slurm["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    for code, restarts, asked in (("0", "0", ""), ("1", "9", "requeue 7\n"), ("2", "0", ""), ("1", "10", "")):
        done = bash("scripts/slurm_het.sbatch", *SETTINGS, **slurm, CODE=code, SLURM_RESTART_COUNT=restarts)
        assert (done.returncode, done.stdout, done.stderr) == (int(code), asked, "")


def test_xpk_gets_the_command_of_a_pod() -> None:
    words = dry_run("xpk.sh", "cluster", "v6e-16", "image", *SETTINGS, SLICES="2")
    assert words[:3] == ["xpk", "workload", "create"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given | {"--command": ""} == {
        "--cluster": "cluster",
        "--tpu-type": "v6e-16",
        "--docker-image": "image",
        "--num-slices": "2",
        "--workload": "moe-jax",
        "--max-restarts": "10",
        "--command": "",
    }
    there = shlex.split(given["--command"])
    assert there[:6] == ["cd", "/moe_jax", "&&", "python", "-m", "moe_jax.train"]
    assert there[6:] == ["--distributed=on", *SETTINGS]
    check_command("train", there[6:])
    assert bash("scripts/xpk.sh", "cluster", "v6e-16").returncode == 2


SKYPILOT = {  # fields of https://docs.skypilot.co/en/latest/reference/yaml-spec.html
    "": {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts", "setup", "run"},
    "resources": {
        *("infra", "accelerators", "accelerator_args", "cpus", "memory", "instance_type", "use_spot", "disk_size"),
        *("disk_tier", "network_tier", "image_id", "ports", "labels", "autostop", "any_of", "ordered", "job_recovery"),
    },
    "job_recovery": {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"},
}


def test_skypilots_nodes_find_the_first_one(tmp_path: Path) -> None:
    task = yaml.safe_load((SCRIPTS / "skypilot.yaml").read_text())
    assert task.keys() <= SKYPILOT[""]
    assert task["resources"].keys() <= SKYPILOT["resources"]
    assert task["resources"]["job_recovery"].keys() <= SKYPILOT["job_recovery"]
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"')
    (tmp_path / "python").chmod(0o755)
    node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    node |= task["envs"] | {"RUN": "s3://my-bucket/run", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    prepare, run = task["run"].split("\n", 1)
    assert prepare == task["setup"].strip()
    words = bash("-c", run, **node).stdout.splitlines()
    assert words[:2] == ["-m", "moe_jax.train"]
    assert words[4:] == [
        *("log.dir=s3://my-bucket/run", "--coordinator", "10.0.0.1:8476", "--num-processes", "2", "--process-id", "1")
    ]
    check_command("train", words[2:])


RAY = {  # parameters of https://docs.ray.io/en/latest/train/api/api.html
    "JaxTrainer": {"train_loop_per_worker", "train_loop_config", "jax_config", "scaling_config", "run_config"},
    "ScalingConfig": {"num_workers", "use_gpu", "use_tpu", "topology", "accelerator_type", "resources_per_worker"},
    "RunConfig": {"name", "storage_path", "failure_config", "checkpoint_config"},
    "FailureConfig": {"max_failures"},
}


@pytest.mark.parametrize(("own", "devices"), [(["4"], {"use_gpu"}), (["4", "4x4", "TPU-V6E"], {"use_tpu", "topology"})])
def test_rays_workers_train_by_the_command(own: list[str], devices: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With classes in the place of Ray's, which know no parameters but Ray's own."""
    made: dict[str, dict[str, Any]] = {}

    def of(name: str) -> Any:
        def make(**given: Any) -> Any:
            assert given.keys() <= RAY[name]
            made[name] = given
            return types.SimpleNamespace(fit=lambda: given["train_loop_per_worker"](given["train_loop_config"]))

        return make

    for module, names in (("ray", ()), ("ray.train", RAY), ("ray.train.v2", ()), ("ray.train.v2.jax", RAY)):
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{name: of(name) for name in names}))
    monkeypatch.syspath_prepend(SCRIPTS)
    import ray_train

    called: list[list[str]] = []
    monkeypatch.setattr("moe_jax.cli.train.main", lambda: called.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["ray_train.py", *own, "--", *SETTINGS])
    ray_train.main()
    assert called == [["--distributed=off", *SETTINGS]]
    check_command("train", called[0])
    assert made["ScalingConfig"]["num_workers"] == 4
    assert devices <= made["ScalingConfig"].keys()
    assert made["FailureConfig"]["max_failures"] > 0
    monkeypatch.setattr(sys, "argv", ["ray_train.py", "4", "4x4", "--", *SETTINGS])
    with pytest.raises(SystemExit) as end:
        ray_train.main()
    assert end.value.code == 2


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
