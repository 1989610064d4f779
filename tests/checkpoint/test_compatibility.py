"""Which checkpoints a run resumes from."""

import dataclasses
import json
from pathlib import Path

import pytest

from moe_jax.checkpoint.compatibility import changed_settings, check_same_model
from moe_jax.config import Config, OptimizerConfig
from moe_jax.config.renamed import RENAMED, RENAMED_VALUES
from moe_jax.config.yaml_io import config_from, load_config
from moe_jax.errors import CheckpointError


def test_a_checkpoint_with_old_names_of_settings_is_of_the_same_model() -> None:
    config = Config()
    saved = json.loads(json.dumps(dataclasses.asdict(config)))  # as a record stores it
    for old, new in RENAMED.items():
        *sections, key = old.split(".")
        section = saved
        for name in sections:
            section = section[name]
        section[key] = section.pop(new)
    assert "d_model" in saved["model"]
    check_same_model(config, saved, Path("run"), step=3)
    with pytest.raises(CheckpointError, match=r"settings of another version \(unknown setting model\.width"):
        check_same_model(config, saved | {"model": saved["model"] | {"width": 3}}, Path("run"), step=3)


def test_another_optimizer_is_refused_with_a_way_to_keep_the_parameters() -> None:
    saved = json.loads(json.dumps(dataclasses.asdict(Config(optimizer=OptimizerConfig(name="muon")))))
    with pytest.raises(CheckpointError) as refusal:
        check_same_model(Config(), saved, Path("run"), step=3)
    assert str(refusal.value) == (
        "optimizer.name=adamw, but the checkpoints in log.dir=run have optimizer.name=muon: use optimizer.name=muon, "
        "or another log.dir with train.init_from=run, which resets the moments"
    )
    del saved["optimizer"]["name"]  # of a version that had no other optimizer than AdamW
    check_same_model(Config(), saved, Path("run"), step=3)


def test_old_values_are_of_settings_that_exist() -> None:
    settings = dataclasses.asdict(Config())
    for name, _ in RENAMED_VALUES:
        section, key = name.split(".")
        assert key in settings[section]


def test_settings_that_changed_are_named_with_what_they_were() -> None:
    saved = json.loads(json.dumps(dataclasses.asdict(Config())))
    assert changed_settings(Config(), saved) == ""
    words = ["model.moe.capacity_factor=null", "schedule.policy=unified", "log.every=3", "train.steps=7"]
    assert changed_settings(load_config(None, words), saved) == (
        "model.moe.capacity_factor=null (was 1.25), schedule.policy=unified (was vanilla), "
        "train.steps=7 (was 1000; the learning rate follows the new number)"
    )


def test_more_steps_change_nothing_at_a_constant_learning_rate() -> None:
    constant = {"optimizer": {"schedule": "constant"}}
    saved = json.loads(json.dumps(dataclasses.asdict(config_from(constant))))
    assert changed_settings(config_from(constant | {"train": {"steps": 7}}), saved) == ""
