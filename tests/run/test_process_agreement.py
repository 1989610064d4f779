"""Processes that were given different settings or data, or hold different replicas, end before they do harm."""

import re
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax.checkpoint import checksums
from moe_jax.checkpoint.checksums import ReplicasError, agreed_digests, digest_program, digests
from moe_jax.errors import ConfigError
from moe_jax.launch.supervisor import reserved_port
from moe_jax.run import setup
from tests.distributed.test_startup_barrier import ended
from tests.launch.test_launch import started

ROOT = Path(__file__).parents[2]
SAME = "as it should be"
SETTINGS = ": give all processes the same config and settings"
DATA = r": give all processes copies of one text \(here it is .*/own[01]/s.txt\)"


def test_settings_data_and_replicas_of_two_processes_are_compared(tmp_path: Path) -> None:
    """All cases in one start: both processes hear the same."""
    with started("--processes=2", "--retries=0", "--module=tests.launched.unequal", str(tmp_path)) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    tokens = r"\d+ tokens of uint8 with crc32 \w{8}"
    expected = {
        "nothing else": SAME,
        "seed": f"2 train.seed is 0 on process 0 and 1 on process 1{SETTINGS}",
        "rate and batch": "2 optimizer.learning_rate is 0.003 on process 0 and 0.03 on process 1; "
        f"train.batch_size is 16 on process 0 and 32 on process 1{SETTINGS}",
        "weight": f"2 model.moe.aux_loss_coeff is 0.01 on process 0 and 0.5 on process 1{SETTINGS}",
        "devices": f"2 mesh.cpu_devices is null on process 0 and 4 on process 1{SETTINGS}",
        "auto": f"2 mesh.data is -1 on process 0 and auto on process 1{SETTINGS}",
        "folder": f"2 log.dir is runs/shakespeare_cpu on process 0 and elsewhere on process 1{SETTINGS}",
        "own host": SAME,
        "times": r"2 schedule.task_times is null on process 0 and a file that cannot be read \(.*\) on process 1"
        + SETTINGS,
        "data, copies": SAME,
        "data, shorter": rf"2 data.path \(validation part\) is {tokens} on process 0 and {tokens} on process 1{DATA}",
        "data, a letter": rf"2 data.path \(validation part\) is {tokens} on process 0 and {tokens} on process 1{DATA}",
        "step 1": SAME,
        "step 2": r"75 replicas of w are not the same after step 2 \(processes 0, 1 differ; 1 of 2 arrays differ\), "
        "so this state is not saved: .*",
    }
    lines = [line for line in err.splitlines() if ": " in line]
    for rank in ("", "[rank 1] "):
        own = [line.removeprefix(rank) for line in lines if line.startswith("[rank 1]") == bool(rank)]
        for line, (case, reported) in zip(own, expected.items(), strict=True):
            assert re.fullmatch(f"{case}: {reported}", line), line
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]


def test_a_training_with_another_text_on_one_process_is_refused_by_both(tmp_path: Path) -> None:
    """As typed, without a launcher."""
    other = tmp_path / "other.txt"
    other.write_bytes((ROOT / "configs" / "text" / "shakespeare.txt").read_bytes()[:500_000])
    with reserved_port() as port:
        meeting = ["--coordinator", f"127.0.0.1:{port}", "--num-processes=2", "--process-id"]
        training = ["--config", "configs/shakespeare_cpu.yaml", "mesh.cpu_devices=2", f"log.dir={tmp_path / 'run'}"]
        command = [sys.executable, "-m", "moe_jax.train", *training]
        settings = ([], [f"data.path={other}"])
        codes, errors = ended([[*command, *more, *meeting, str(i)] for i, more in enumerate(settings)])
    assert codes == [2, 2], errors
    for error in errors:
        (reported,) = (line for line in error.splitlines() if line.startswith("error: "))
        assert re.match(
            r"error: data.path \(train part\) is \d+ tokens of uint8 with crc32 \w+ on process 0 and ", reported
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("expert"), PartitionSpec(None, "data")])
def test_one_bit_of_one_replica_is_noticed_however_arrays_are_cut(spec: PartitionSpec) -> None:
    """One that no other device holds is in no replica."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "expert"))
    x = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, spec))
    state = {"a": x + 1, "b": x}
    program = digest_program(state)
    assert agreed_digests(program(state), 3, state).tolist() == digests(state).tolist()
    parts = [np.array(shard.data) for shard in x.addressable_shards]
    parts[5].view(np.uint32)[1, 1] ^= 1
    placed = [jax.device_put(part, shard.device) for part, shard in zip(parts, x.addressable_shards, strict=True)]
    state["b"] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)
    with pytest.raises(
        ReplicasError, match=r"replicas of b .* after step 3 \(devices of process 0 differ; 1 of 2 arrays"
    ):
        agreed_digests(program(state), 3, state)


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ([], None),
        ([2], "process 2 differs from the others"),
        ([0], "process 0 differs from the others"),
        ([0, 1, 2], "processes 0, 1, 2 differ"),  # from each other
    ],
)
def test_digests_that_differ_on_one_of_three_processes_name_it(
    changed: list[int], where: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has one device, and all digests in a row: those of `b` are others on some."""
    found = {rank: np.arange(4, dtype=np.uint32).reshape(2, 2) for rank in range(3)}
    for rank in changed:
        found[rank][1, 0] += 1 + rank
    codes = [zlib.crc32(rows.tobytes()) | 1 for rows in found.values()]
    monkeypatch.setattr(checksums, "allgather", lambda own: codes)
    monkeypatch.setattr(
        checksums, "allgather_rows", lambda own: np.stack([np.stack([rows, rows]) for rows in found.values()])
    )
    state = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    for rank in range(3):
        if where is None:
            assert (agreed_digests(found[rank], 4, state) == found[rank]).all()
            continue
        with pytest.raises(ReplicasError, match=rf"replicas of b .* after step 4 \({where}; 1 of 2 arrays differ\)"):
            agreed_digests(found[rank], 4, state)


def test_parameters_that_differ_between_processes_are_those_of_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train.init_from` is read by each process. Two of them are stood for: the other has other digests."""
    program, state = SimpleNamespace(result=lambda: lambda _: np.zeros((1, 2), np.uint32)), {"w": jnp.zeros(1)}
    programs = SimpleNamespace(init=SimpleNamespace(result=lambda: lambda params: params), digests=program)
    train = SimpleNamespace(init_from="models/mine")
    run = SimpleNamespace(config=SimpleNamespace(train=train), trainer=SimpleNamespace(param_shapes=None))
    monkeypatch.setattr(setup, "source_params", lambda config, shapes: state)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    other = 0
    monkeypatch.setattr(checksums, "allgather", lambda own: [own, own + other])
    monkeypatch.setattr(checksums, "allgather_rows", lambda own: np.stack([own, own + other]).astype(np.uint32))
    assert setup.first_state(run, programs) is state
    other = 1
    with pytest.raises(ConfigError) as refusal:
        setup.first_state(run, programs)
    assert str(refusal.value) == (
        "train.init_from=models/mine holds other parameters on other processes: give them copies of one folder"
    )
