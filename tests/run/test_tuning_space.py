"""What a run may try on a mesh, and where it begins."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import pytest

from moe_jax.config import Config, LogConfig, TuneConfig
from moe_jax.errors import ConfigError
from moe_jax.parallel.mesh import make_mesh
from moe_jax.plan.tuner import Tuned, read_tuned, write_tuned
from moe_jax.run import tuning_space
from moe_jax.run.tuning_space import Choices, choices_of
from moe_jax.step.scheduled.build import reductions_of
from tests.small import small_config

CHUNKED = {"policy": "unified", "microbatches": 2, "grad_reduce": "bucketed"}


def config_of(
    folder: Path, *over: str, data: int = 2, expert: int = 4, batch_size: int = 16, **changes: object
) -> Config:
    config = small_config(data, expert, batch_size=batch_size, **{"schedule": CHUNKED, **changes})  # type: ignore[arg-type]
    return dataclasses.replace(config, tune=TuneConfig(over=over), log=LogConfig(dir=str(folder)))  # type: ignore[arg-type]


def found(config: Config) -> Choices:
    choices = choices_of(config, make_mesh(config.mesh))
    assert choices is not None
    return choices


def test_nothing_is_tuned_unless_asked_for(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert choices_of(config, make_mesh(config.mesh)) is None


def test_chunks_reach_from_a_64th_of_the_largest_sum_of_a_block_to_all_of_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, "bucket_cap_mb")
    mesh, choices = make_mesh(config.mesh), found(config)
    sizes = [float(size) for (size,) in choices.values]
    cuts = {tuple(owner.buckets for owner in reductions_of(config, mesh, size)) for size in sizes}
    assert len(cuts) == len(sizes) > 12, "no two sizes cut alike"
    for size, parts in ((sizes[-1], 1), (sizes[0], 64)):
        blocks = reductions_of(config, mesh, size)[1:-1]
        assert max(sum(bucket.group == 0 for bucket in block.buckets) for block in blocks) == pytest.approx(
            parts, rel=0.05
        )
    assert choices.first == len(sizes) - 1, "null is all of it"


def test_a_size_of_the_users_own_is_a_choice_and_the_first_one(tmp_path: Path) -> None:
    choices = found(config_of(tmp_path, "bucket_cap_mb", schedule=CHUNKED | {"bucket_cap_mb": 0.00123}))
    assert len(choices.values) == 1 + len(found(config_of(tmp_path, "bucket_cap_mb")).values)
    assert choices.config.schedule.bucket_cap_mb == 0.00123


def test_microbatches_have_to_divide_the_sequences_of_a_device(tmp_path: Path) -> None:
    assert found(config_of(tmp_path, "microbatches")).values == ((1,), (2,))
    backward = CHUNKED | {"backward_microbatches": 2}
    assert found(config_of(tmp_path, "microbatches", batch_size=32, schedule=backward)).values == ((2,), (4,))


def test_algorithms_are_those_that_differ_here(tmp_path: Path) -> None:
    """One process is one node, unless the config says otherwise."""
    names = {name for (name,) in found(config_of(tmp_path, "algorithm")).values}
    assert names == {"flat", "ring", "background"}
    by_node = found(config_of(tmp_path, "algorithm", exchange={"ranks_per_node": 2}))
    assert {name for (name,) in by_node.values} == names | {"hier_1d", "hier_2d", "halo"}
    assert by_node.describe(by_node.first) == "exchange.algorithm=flat"


def test_settings_are_combined(tmp_path: Path) -> None:
    choices = found(config_of(tmp_path, "bucket_cap_mb", "microbatches", "algorithm"))
    assert len(choices.values) == len(found(config_of(tmp_path, "bucket_cap_mb")).values) * 2 * 3
    assert choices.config_of(choices.first) == choices.config
    other = choices.config_of(choices.values.index((choices.values[0][0], 1, "ring")))
    assert (other.schedule.microbatches, other.exchange.algorithm) == (1, "ring")


@pytest.mark.parametrize(
    ("over", "mesh", "message"),
    [
        ("bucket_cap_mb", {"data": 1, "expert": 1}, "no gradients are summed over one device"),
        ("algorithm", {"data": 8, "expert": 1}, r"tune.over=\[algorithm\] leaves nothing to choose here"),
        ("microbatches", {"batch_size": 8, "schedule": {"policy": "unified"}}, r"\[microbatches\] leaves nothing"),
    ],
)
def test_what_leaves_no_choice_is_refused(over: str, mesh: dict, message: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, over, **mesh)
    devices = jax.devices()[: config.mesh.data * config.mesh.expert]
    with pytest.raises(ConfigError, match=message):
        choices_of(config, make_mesh(config.mesh, devices))


def test_what_was_found_is_where_the_next_run_begins_if_it_is_the_same(tmp_path: Path) -> None:
    config = config_of(tmp_path, "bucket_cap_mb", "algorithm")
    first = found(config)
    first.write(3, 0.25)
    again = found(config)
    assert (again.first, again.best_s, again.values) == (3, 0.25, first.values)
    assert again.config == first.config_of(3)
    assert found(dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=32))).best_s is None
    shared = dataclasses.replace(
        config, log=LogConfig(dir="elsewhere"), tune=TuneConfig(over=config.tune.over, cache=str(first.file))
    )
    assert found(shared).best_s == 0.25


def test_a_cache_that_could_not_be_written_is_refused_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = f"{tmp_path}/file/tuned.json"
    config = dataclasses.replace(config_of(tmp_path), tune=TuneConfig(over=("bucket_cap_mb",), cache=cache))
    message = f"tune.cache={cache} cannot be written ({tmp_path}/file: Not a directory): name another file"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        found(config)


def test_process_0_alone_reads_what_was_found_and_the_others_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that it cannot be read: a file that another process reads a moment later may be another one."""
    sent: list[str] = []

    def from_process_0(source: int, value: object) -> object:
        assert source == 0
        if tuning_space.is_main_process():
            sent.append(json.dumps(value))
        return json.loads(sent[-1])

    def not_read(*_: object) -> None:
        raise AssertionError("process 1 reads the file")

    def act_as(rank: int) -> None:
        monkeypatch.setattr(tuning_space, "is_main_process", lambda: rank == 0)
        monkeypatch.setattr(tuning_space, "read_tuned", read_tuned if rank == 0 else not_read)

    file, best = tmp_path / "tuned.json", Tuned({"bucket_cap_mb": 2.0, "algorithm": "ring"}, 0.25)
    monkeypatch.setattr(tuning_space, "from_process", from_process_0)
    write_tuned(file, {"mesh": 8}, best)
    for rank in range(2):
        act_as(rank)
        assert tuning_space._agreed_found(str(file), file, {"mesh": 8}) == best
    for rank in range(2):
        act_as(rank)
        assert tuning_space._agreed_found(str(file), file, {"mesh": 4}) is None
    file.write_text("{")
    refused = []
    for rank in range(2):
        act_as(rank)
        with pytest.raises(ConfigError) as error:
            tuning_space._agreed_found(str(file), file, {"mesh": 8})
        refused.append(str(error.value))
    assert refused[0] == refused[1]


@pytest.mark.parametrize(
    ("over", "settings", "problem"),
    [
        ("bucket_cap_mb", {"bucket_cap_mb": "x"}, "has .*, which are no settings"),
        ("bucket_cap_mb", {"bucket_cap_mb": None}, "is no list of settings with step times"),
        ("algorithm", {"algorithm": "carrier_pigeon"}, "has .*, which do not work here"),
        ("microbatches", {"microbatches": 5}, "has .*, which do not work here"),
    ],
)
def test_settings_in_the_file_that_do_not_work_are_refused(
    over: str, settings: dict, problem: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, over)
    found(config).write(0, 0.25)
    file = tmp_path / "tuned.json"
    (entry,) = json.loads(file.read_text())
    file.write_text(json.dumps([entry | {"settings": settings}]))
    with pytest.raises(ConfigError, match=f"tuned.json,? {problem}: remove it, or set tune.cache to another file"):
        found(config)
