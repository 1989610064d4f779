"""Measured times of tasks in place of estimated ones."""

import re
from pathlib import Path

import pytest

from moe_jax.config import Config, Model, MoE
from moe_jax.errors import ConfigError
from moe_jax.plan.costs import rates_of, task_times
from moe_jax.plan.measured import read_times, write_times

_DENSE = {"F": 0.6, "B": 0.5, "W": 0.4}
_SECONDS = {"attend": {"F": 0.3, "B": 0.4, "W": 0.2}, "expert": {"F": 0.8, "B": 0.9, "W": 0.7}}
_KINDS = ("dense", "moe", "moe")


def test_what_is_written_is_read_for_one_block(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    write_times(file, _SECONDS | {"dense": _DENSE})
    times = read_times(str(file), _KINDS)
    assert set(times) == {"attend", "expert", "dense"}
    assert times["dense"].forward == 0.6  # there is one such block
    found = times["expert"]
    assert [found.forward, found.backward, found.weight] == [0.4, 0.45, 0.35]
    assert found.rate.seconds(found.forward, 2) == 0.2


def test_measured_ops_replace_estimated_ones(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    write_times(file, {"expert": _SECONDS["expert"]})
    model = Model(num_layers=3, moe=MoE(num_experts=8, first_dense_blocks=1))
    config = Config(model=model)
    rates = rates_of(config, "cpu", 2, 1, 2)
    estimated, measured = (
        task_times(config, 64, 2, 1, [[0.0]] * 5, rates, found)
        for found in ({}, read_times(str(file), model.block_kinds))
    )
    assert measured.compute["expert"].forward == 0.4
    assert measured.compute["attend"] == estimated.compute["attend"]
    assert measured.transfer == estimated.transfer


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory): name a file of measured times, or null"),
        ("{", "cannot be read (it is no JSON): name a file of measured times, or null"),
        ("[]", "is no file of measured times: it wants forward_s, backward_s, weight_s, seconds from 0 up"),
        ('{"gate": {"forward_s": 1, "backward_s": 1, "weight_s": 1}}', "is no file of measured times"),
        ('{"expert": {"forward_s": 1, "backward_s": 1}}', "is no file of measured times"),
        ('{"expert": {"forward_s": -1, "backward_s": 1, "weight_s": 1}}', "is no file of measured times"),
        ('{"expert": {"forward_s": NaN, "backward_s": 1, "weight_s": 1}}', "is no file of measured times"),
        ('{"expert": {"forward_s": true, "backward_s": 1, "weight_s": 1}}', "is no file of measured times"),
        (
            '{"expert": {"forward_s": 1' + "0" * 400 + ', "backward_s": 1, "weight_s": 1}}',
            "is no file of measured times",
        ),
        ('{"expert": {"forward_s": "1", "backward_s": 1, "weight_s": 1}}', "is no file of measured times"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "times.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(f"schedule.task_times={file} {message}")):
        read_times(str(file), _KINDS)
