"""How a process finds its run: flags, clusters, and what happens when it cannot."""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing

import jax
import pytest

from moe_jax.distributed import processes
from moe_jax.distributed.cluster import ClusterManager, _has_all_devices, detect_cluster
from moe_jax.distributed.processes import ProcessError, Processes, initialize
from moe_jax.errors import DataError, UserError
from moe_jax.launch.supervisor import reserved_port

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://localhost:1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
TPU_POD = {"TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3", "TPU_WORKER_ID": "1", "TPU_SKIP_MDS_QUERY": "true"}
MULTISLICE = TPU_POD | {"MEGASCALE_NUM_SLICES": "2"}
INDEXED_JOB = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


def parse(*flags: str) -> Processes:
    parser = argparse.ArgumentParser()
    processes.add_arguments(parser)
    return processes.options_from(parser.parse_args(flags))


def program(body: str) -> list[str]:
    imports = (
        "import jax, socket\nfrom moe_jax.errors import run_command\nfrom moe_jax.distributed.processes import *\n"
    )
    return [sys.executable, "-c", f"{imports}def main():\n    {body}\nrun_command(main)"]


def run_python(body: str) -> tuple[int, str, str]:
    done = subprocess.run(program(body), capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def clear(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An environment of no cluster, whatever machine the tests run on."""
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "KUBERNETES_", "JAX_COORDINATOR_", "JAX_LOCAL_")):
            monkeypatch.delenv(name)
    yield monkeypatch
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        (["--num-processes=2"], "--num-processes=2 also needs --coordinator and --process-id"),
        (["--coordinator=h:1", "--process-id=0"], "--coordinator=h:1 --process-id=0 also needs --num-processes:"),
        (["--coordinator=h", "--num-processes=2", "--process-id=0"], "--coordinator=h must be HOST:PORT"),
        (["--coordinator=h:x", "--num-processes=2", "--process-id=0"], "--coordinator=h:x must be HOST:PORT"),
        (["--coordinator=h:65536", "--num-processes=2", "--process-id=0"], "port in 1..65535"),
        (["--coordinator=h:1", "--num-processes=2", "--process-id=2"], "--process-id=2 must be 0..1"),
        (["--coordinator=h:1", "--num-processes=2", "--process-id=-1"], "--process-id=-1 must be 0..1"),
        (["--join-timeout=0"], "--join-timeout=0 must be above 0"),
        (["--join-timeout=nan"], "--join-timeout=nan must be above 0"),
        (["--coordinator=h:1", "--num-processes=0", "--process-id=0"], "--num-processes=0 must be at least 1"),
        (["--coordinator=h:1", "--num-processes=1", "--process-id=0", "--distributed=off"], "drop one of them"),
    ],
)
def test_flags_that_contradict_are_refused_with_a_cure(flags: list[str], reported: str) -> None:
    with pytest.raises(UserError, match=reported) as refusal:
        parse(*flags)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("environ", "tpu", "found"),
    [
        ({}, False, None),
        (SLURM, False, ClusterManager("SLURM", 2)),
        (SLURM | {"SLURM_NTASKS": "1"}, False, ClusterManager("SLURM", 1)),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, False, None),  # sbatch's own shell
        ({"OMPI_MCA_orte_hnp_uri": "1;tcp://h:1", "OMPI_COMM_WORLD_SIZE": "3"}, False, ClusterManager("Open MPI", 3)),
        (TPU_POD, True, ClusterManager("TPU", 4)),
        (MULTISLICE, True, ClusterManager("TPU", 8)),
        (TPU_POD | {"TPU_WORKER_HOSTNAMES": "localhost"}, True, ClusterManager("TPU", 1)),
        (TPU_POD, False, None),
        ({}, True, ClusterManager("TPU", None)),
        ({"TPU_SKIP_MDS_QUERY": "1"}, True, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False, None),  # a pod of no job
    ],
)
def test_clusters_are_distinguished_by_the_environment(
    environ: Mapping[str, str], tpu: bool, found: ClusterManager | None
) -> None:
    assert detect_cluster(environ, tpu) == found


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS", "MEGASCALE_NUM_SLICES"])
@pytest.mark.parametrize("value", ["0", "-2", "two", "2.5", "1048577", "9" * 5000])
def test_a_variable_without_a_number_of_processes_is_refused_with_a_cure(name: str, value: str) -> None:
    (environ,) = (each for each in (SLURM, OPEN_MPI, MULTISLICE) if name in each)
    with pytest.raises(ProcessError, match=rf"{name}={value} must be a number of processes .*--distributed=off"):
        detect_cluster({**environ, name: value}, tpu=True)


@pytest.mark.parametrize("environ", [SLURM, OPEN_MPI])
def test_variables_of_a_cluster_without_a_valid_rank_are_refused_before_jax_reads_them(
    environ: Mapping[str, str], clear: pytest.MonkeyPatch
) -> None:
    ranks = [name for name in environ if name.endswith(("RANK", "PROCID", "LOCALID"))]
    assert len(ranks) == 2
    for name, value in [(name, value) for name in ranks for value in ("", "abc", "2", "-1")]:
        with clear.context() as changed:
            for each, text in {**environ, name: value}.items():
                changed.setenv(each, text)
            with pytest.raises(ProcessError, match=rf"{name}={value} must be a number in 0\.\.1: .*--distributed=off"):
                initialize(parse(), None)


@pytest.mark.parametrize(
    ("environ", "reported"),
    [
        (SLURM | {"SLURM_JOB_ID": "x"}, "variables of SLURM .* invalid literal .*pass --coordinator"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "gives :.* as the coordinator, which must be HOST:PORT: set JAX_"),
        (SLURM | {"JAX_COORDINATOR_PORT": "x"}, "gives localhost:x as the coordinator"),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,x"}, "JAX_LOCAL_DEVICE_IDS=0,x in the environment"),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "garbage"}, "variables of Open MPI"),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp"}, "Could not parse coordinator IP address"),
    ],
)
def test_other_variables_that_jax_cannot_read_are_refused_with_a_cure(
    environ: Mapping[str, str], reported: str, clear: pytest.MonkeyPatch
) -> None:
    for each, text in environ.items():
        clear.setenv(each, text)
    with pytest.raises(ProcessError, match=reported):
        initialize(parse(), None)


@pytest.mark.parametrize(
    ("environ", "has_all"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),1,4", "SLURM_NODEID": "2"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),1,4", "SLURM_NODEID": "3"}, False),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_NODEID": "1", "CUDA_VISIBLE_DEVICES": "5"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "CUDA_VISIBLE_DEVICES": "0,1"}, False),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_NODEID": ""}, False),
        ({}, False),
    ],
)
def test_a_task_has_all_gpus_if_it_is_alone_on_its_node_or_sees_one(environ: dict[str, str], has_all: bool) -> None:
    """jax takes the one of the task's number on the node, which of eight is one, and of one may be none."""
    assert _has_all_devices(environ, ClusterManager("SLURM", 2)) == has_all


@pytest.mark.parametrize("problem", [ConnectionError("no route"), None])
def test_tpus_without_a_metadata_server_train_alone_unless_their_slice_has_other_hosts(
    problem: Exception | None, clear: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: object) -> tuple[None, ...]:
        if problem:
            raise problem
        return (None,) * 4  # nothing that jax knows is here

    clear.setattr("moe_jax.distributed.processes.detect_cluster", lambda *_, **__: ClusterManager("TPU", None))
    clear.setattr("jax._src.clusters.ClusterEnv.auto_detect_unset_distributed_params", ask)
    initialize(parse(), None)
    assert capsys.readouterr().out.startswith("this process runs alone (--distributed: jax ")
    with pytest.raises(ProcessError, match=r"pass --coordinator, --num-processes and --process-id$"):
        initialize(parse("--distributed=on"), None)
    clear.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ProcessError, match="these devices are of 4 hosts, which did not find each other: pass"):
        initialize(parse(), None)


@pytest.mark.parametrize("installed", [True, False])
def test_an_indexed_kubernetes_job_counts_where_jax_can_ask_its_api(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed or None)
    assert detect_cluster(INDEXED_JOB, tpu=False) == (ClusterManager("Kubernetes", None) if installed else None)


def test_auto_is_alone_on_a_plain_machine_at_once_and_without_a_socket(clear: pytest.MonkeyPatch) -> None:
    clear.setattr(socket, "socket", None)
    durations = []
    for _ in range(5):  # the machine may be busy during some
        began = time.perf_counter()
        initialize(parse(), None)
        durations.append(time.perf_counter() - began)
    assert min(durations) < 0.05


def test_a_slurm_job_of_one_task_is_alone(clear: pytest.MonkeyPatch) -> None:
    for name, value in (SLURM | {"SLURM_NTASKS": "1"}).items():
        clear.setenv(name, value)
    clear.setattr(socket, "socket", None)  # nobody else is asked
    initialize(parse(), None)


def test_on_needs_a_cluster(clear: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProcessError, match="--distributed=on finds no"):
        initialize(parse("--distributed=on"), None)


def test_simulated_devices_must_divide_over_the_processes(clear: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProcessError, match=r"cpu_devices=8 is not divisible by 3 .* set mesh.cpu_devices=6 or 9"):
        initialize(parse("--coordinator=h:1", "--num-processes=3", "--process-id=0"), 8)
    clear.setattr(processes, "detect_cluster", lambda environ, tpu: ClusterManager("Kubernetes", None))
    with pytest.raises(ProcessError, match="unknown number of Kubernetes processes: pass --coordinator"):
        initialize(parse(), 8)


def test_simulated_devices_that_come_too_late_are_refused_unless_they_are_there(clear: pytest.MonkeyPatch) -> None:
    clear.setenv("XLA_FLAGS", "")
    initialize(parse(), jax.device_count())
    with pytest.raises(ProcessError, match="cpu_devices=3 comes too late, jax already runs with 8 cpu devices"):
        initialize(parse(), 3)


def test_simulated_devices_win_over_xla_flags(clear: pytest.MonkeyPatch) -> None:
    clear.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    code, out, err = run_python("initialize(Processes(), 4); print(jax.device_count())")
    assert (code, out) == (0, "4\n"), err


def test_simulated_devices_have_threads_and_compile_quickly_unless_the_environment_sets_others(
    clear: pytest.MonkeyPatch,
) -> None:
    clear.delenv("PJRT_NPROC")
    report = "import os; print(os.environ['PJRT_NPROC'], os.environ['XLA_FLAGS'], float(jax.jit(lambda: 2.0)()))"
    for in_background, threads in ((True, 32), (False, 8)):
        clear.setenv("XLA_FLAGS", "--xla_backend_extra_options=xla_cpu_disable_slp_vectorizer")
        code, out, err = run_python(f"initialize(Processes(), 4, in_background={in_background}); {report}")
        assert code == 0, err
        found, *flags, _ = out.split()
        assert (int(found), flags[0]) == (threads, "--xla_backend_extra_options=xla_cpu_disable_slp_vectorizer")
        assert len(flags) == 1, "what the environment says stays"
    clear.setenv("PJRT_NPROC", "5")
    clear.setenv("XLA_FLAGS", "")
    code, out, err = run_python(f"initialize(Processes(), 4, quick_compile=True); {report}")
    flags = [f"{name}={value}" for name, value in (processes.NO_UNROLLING | processes.OLDER_EMITTERS).items()]
    assert (code, out.split()) == (0, ["5", *flags, "2.0"]), err


def test_a_coordinator_that_does_not_answer_is_one_line(clear: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        options = f"Processes(coordinator={address!r}, num_processes=2, process_id=1, join_timeout_s=0.5)"
        code, out, err = run_python(f"initialize({options}, None)")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --coordinator={address} does not answer for 0.5 s (Connection refused)")
    assert err.count("\n") == 1


def test_a_port_in_use_is_one_line(clear: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ProcessError, match=rf"{address} cannot be opened by process 0 \(Address already in use\)"):
            initialize(Processes(coordinator=address, num_processes=1, process_id=0), None)


def test_the_coordinator_listens_on_the_given_address_only(clear: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        options = f"Processes(coordinator='127.0.0.1:{port}', num_processes=1, process_id=0)"
        try_both = f"print([socket.socket().connect_ex((host, {port})) == 0 for host in ('127.0.0.1', '127.0.0.2')])"
        code, out, err = run_python(f"initialize({options}, None); {try_both}")
    assert (code, out) == (0, "[True, False]\n"), err


def test_tasks_of_a_slurm_job_join_by_themselves(clear: pytest.MonkeyPatch) -> None:
    body = "initialize(Processes(), 4); print(jax.process_index(), jax.process_count(), jax.local_device_count())"
    tasks = [
        subprocess.Popen(
            program(body),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **SLURM, "SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": str(i)},
        )
        for i in range(2)
    ]
    reported = [task.communicate(timeout=60)[0].splitlines()[-1] for task in tasks]
    assert reported == ["0 2 2", "1 2 2"]


@pytest.mark.parametrize("is_main", [True, False])
def test_process_0_is_first_and_the_others_do_not_wait_for_its_error(
    is_main: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(processes, "is_main_process", lambda: is_main)
    monkeypatch.setattr(processes, "allgather", lambda _: happened.append("barrier"))

    def action() -> int:
        happened.append("action")
        return 5

    def fail() -> int:
        happened.append("action")
        raise DataError("no text")

    order = ["action", "barrier"] if is_main else ["barrier", "action"]
    assert processes.main_first(action) == 5
    assert happened == order
    with pytest.raises(DataError, match="no text"):
        processes.main_first(fail)
    assert happened == order * 2
