"""What runs found, in one file for all of them."""

import re
from pathlib import Path

import pytest

from moe_jax.errors import ConfigError
from moe_jax.plan.tuner import Tuned, read_tuned, write_tuned

HERE = {"model": {"hidden_size": 16, "schedule": ((10, 1.5),)}, "mesh": {"data": 2}}  # tuples are lists in a file
THERE = {"model": {"hidden_size": 16}, "mesh": {"data": 4}}


def test_what_was_found_is_found_again_for_the_same_alone(tmp_path: Path) -> None:
    file = tmp_path / "shared" / "tuned.json"
    assert read_tuned(file, HERE) is None
    for of, bucket_cap_mb in ((HERE, 1.0), (THERE, 2.0), (HERE, 3.0)):
        write_tuned(file, of, Tuned({"bucket_cap_mb": bucket_cap_mb, "algorithm": "ring"}, 0.25))
    assert read_tuned(file, HERE) == Tuned({"bucket_cap_mb": 3.0, "algorithm": "ring"}, 0.25)
    assert read_tuned(file, THERE) == Tuned({"bucket_cap_mb": 2.0, "algorithm": "ring"}, 0.25)
    assert read_tuned(file, {"model": {}}) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read (it is no JSON)"),
        ("{}", "is no list of settings with step times"),
        ('[{"of": {}, "settings": {}}]', "is no list of settings with step times"),
        ('[{"of": {}, "settings": {}, "step_s": -1.0}]', "is no list of settings with step times"),
    ],
)
def test_a_damaged_file_is_named(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{file}, {reason}: remove it, or set tune.cache")):
        read_tuned(file, HERE)
