"""Which processes go on when one fails at every start."""

from pathlib import Path

from moe_jax.launch.places import Places


def test_only_a_place_that_alone_was_blamed_is_left_out() -> None:
    places = Places(4, 2)
    places.blame(1)
    places.blame(2)
    assert not places.leave_out(no_mesh=False)
    places.refill()
    places.blame(1)
    assert places.leave_out(no_mesh=False)
    assert places.used == [0, 2, 3]
    assert places.leave_out(no_mesh=True)
    assert places.used == [0, 2]
    assert not places.leave_out(no_mesh=True), "no fewer than two"
    places.refill()
    assert places.used == [0, 1, 2, 3]


def test_fewer_processes_have_fewer_devices_and_a_mesh_that_the_planner_chooses(tmp_path: Path) -> None:
    config = tmp_path / "experiment.yaml"
    config.write_text("mesh: {cpu_devices: 4, expert: 4}\n")
    command = ["--config", str(config), "mesh.cpu_devices=8", "train.steps=5"]
    places = Places(4, 1)
    assert places.overrides(command) == []
    places.blame(0)
    places.leave_out(no_mesh=False)
    assert places.overrides(command) == ["mesh.data=auto", "mesh.expert=auto", "mesh.cpu_devices=6"]
    assert places.overrides(["--quick"]) == [], "of another module than training"
