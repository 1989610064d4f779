"""What says auto is planned for the devices at hand, once, and continues with the run."""

from pathlib import Path

import pytest

from moe_jax.config import Config
from moe_jax.config.draft import Draft
from moe_jax.config.yaml_io import load_config, load_draft, to_yaml
from moe_jax.errors import UserError
from moe_jax.run import resolve_auto as choose
from moe_jax.run.resolve_auto import ResolvedConfig
from moe_jax.run.setup import open_run

SETTINGS = [
    *(
        "model.hidden_size=16",
        "model.num_attention_heads=2",
        "model.num_layers=1",
        "data.seq_len=16",
        "train.batch_size=16",
    ),
    *("model.moe.num_experts=8", "model.moe.intermediate_size=16", "mesh.data=auto", "mesh.expert=auto"),
    *("schedule.policy=auto", "schedule.microbatches=auto", "schedule.grad_reduce=auto", "schedule.bucket_cap_mb=auto"),
]


@pytest.mark.parametrize(
    ("override", "waits"),
    [
        ("exchange.algorithm=flat", False),
        ("exchange.algorithm=background", True),
        ("exchange.reduction=background", True),
        ("exchange.algorithm=tests.somewhere:exchange", True),
        ("tune.over=[algorithm]", True),
        ("tune.over=[bucket_cap_mb]", False),
    ],
)
def test_what_may_wait_in_threads_of_the_host_is_known_before_anything_is_chosen(override: str, waits: bool) -> None:
    assert load_draft(None, [override, "schedule.policy=auto"]).may_wait_in_threads == waits


def draft_in(folder: Path, *overrides: str) -> Draft:
    return load_draft(None, [*SETTINGS, f"log.dir={folder}", *overrides])


def pretend_run(folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's folder, with a checkpoint."""
    (folder / "config.yaml").write_text(to_yaml(config))
    monkeypatch.setattr(choose, "agreed_newest", lambda run, damaged: 5)


def test_a_plan_fits_the_devices_and_is_reported(tmp_path: Path) -> None:
    found = choose.resolve_auto(draft_in(tmp_path))
    assert found == choose.resolve_auto(draft_in(tmp_path)), "every process finds the same"
    assert found.config.mesh.data * found.config.mesh.expert == 8
    assert f"mesh.expert={found.config.mesh.expert} schedule.bucket_cap_mb=" in found.facts["auto"]
    assert found.facts["auto"].endswith(", planned for cpux8, whose simulated devices overlap nothing")
    assert found.config.schedule.microbatches == 1, "simulated devices share the cores: nothing can be hidden"
    assert open_run(found.config).first_step == 0


def test_a_config_without_auto_is_unchanged(tmp_path: Path) -> None:
    draft = load_draft(None, [f"log.dir={tmp_path}"])
    assert choose.resolve_auto(draft) == ResolvedConfig(load_config(None, [f"log.dir={tmp_path}"]), {})


def test_a_resumed_run_keeps_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"mesh": {"data": 4, "expert": 2}, "schedule": {"policy": "expert_pipeline", "microbatches": 8}}
    saved = draft_in(tmp_path).choose(**chosen)
    pretend_run(tmp_path, saved, monkeypatch)
    found = choose.resolve_auto(draft_in(tmp_path))
    assert found.config == saved
    assert found.facts["auto"].endswith(f", as in {tmp_path}")


@pytest.mark.parametrize(
    ("saved", "overrides"),
    [
        ({"data": 2, "expert": 2}, []),  # of four devices
        ({"data": 2, "expert": 4}, ["mesh.data=8"]),  # now of other axes
    ],
)
def test_a_run_on_another_mesh_is_planned_again(
    saved: dict[str, int], overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_run(tmp_path, draft_in(tmp_path).choose(mesh=saved), monkeypatch)
    found = choose.resolve_auto(draft_in(tmp_path, *overrides))
    assert found.config.mesh.data * found.config.mesh.expert == 8
    assert found.facts["auto"].endswith(", planned for cpux8, whose simulated devices overlap nothing")


def test_processes_that_differ_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "allgather", lambda number: [number, number + 1])
    with pytest.raises(UserError, match=r"^schedule\.policy=auto became something else on other processes: give them"):
        choose.resolve_auto(draft_in(tmp_path))
