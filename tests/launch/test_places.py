"""Which processes continue when one fails at every start."""

from pathlib import Path

from moe_jax.launch.places import Places, settings_of_fewer


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
    assert settings_of_fewer(command, 4, of=4) == []
    assert settings_of_fewer(command, 3, of=4) == ["mesh.data=auto", "mesh.expert=auto", "mesh.cpu_devices=6"]
    fewer = settings_of_fewer([*command, "--join-timeout", "60"], 3, of=4)
    assert fewer == settings_of_fewer(command, 3, of=4), "60 is no setting"
    assert settings_of_fewer(["--quick"], 3, of=4) == [], "of another module than training"


def test_places_of_a_lost_host_are_missing_until_it_returns_and_broken_ones_are_tried_again() -> None:
    places = Places(6, 2, per_host=2)
    places.blame(0)
    assert places.leave_out(no_mesh=False)
    places.use_hosts({0, 1, 2})
    assert places.used == [1, 2, 3, 4, 5], "the same hosts as before"
    places.use_hosts({0, 2})
    assert places.used == [0, 1, 4, 5]
    assert [places.host(place) for place in places.used] == [0, 0, 2, 2]
    places.use_hosts({0, 1, 2})
    assert places.used == list(range(6))
