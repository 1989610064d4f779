"""Too many bad steps in a row: the run goes back once, and is as if nothing had been, or stops and says where."""

import dataclasses
import json
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from moe_jax.data.loader import batch_samples
from moe_jax.data.mixture import Mixture
from moe_jax.data.samples import Samples
from moe_jax.data.sources import open_tokens
from moe_jax.data.token_marks import mark_documents
from moe_jax.errors import EXIT_DIVERGED, DivergedError
from moe_jax.run import describe, loop
from moe_jax.run.locate_nonfinite import _outputs
from moe_jax.run.loop import train
from moe_jax.run.setup import Programs, Run, compile_programs
from moe_jax.step import fault_injection as faults
from moe_jax.step.trainer import make_trainer
from tests.run.test_resume import config_in, lines_of, losses_of
from tests.run.whole_runs import compiled_once
from tests.small import small_config, tokens_of
from tests.step.gradients import first_state, mesh_of

FAULTY, SOUND = True, False
SHORT = ("train.steps=6", "train.bad_in_a_row=2", "checkpoint.every=2", "train.eval_every=0")
FAULT = {"step": 4, "steps": 2, "device": 5, "parameter": "segments.0.1.norm"}  # of block 1


@pytest.fixture(scope="module")
def compiled() -> dict[bool, Programs]:
    return {}


@pytest.fixture
def starts(compiled, monkeypatch) -> list[bool]:
    """What the next starts of a run compute with; the last one stays."""
    kinds: list[bool] = []

    def compile_once(run: Run) -> Programs:
        kind = kinds.pop(0) if len(kinds) > 1 else kinds[0]
        if kind not in compiled:
            with faults.nan_at(**FAULT) if kind is FAULTY else faults.nan_at(step=10**6, device=0):
                trainer = make_trainer(run.config, run.trainer.mesh)
                compiled[kind] = compile_programs(dataclasses.replace(run, trainer=trainer))
        return compiled[kind]

    monkeypatch.setattr(loop, "compile_programs", compile_once)
    for module in (loop, describe):
        monkeypatch.setattr(module, "matrix_flops_per_s", lambda dtype: 1e12)
    return kinds


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_was_transient_trains_on_as_if_nothing_had_been(starts, tmp_path, capsys, exact):
    starts[:] = [FAULTY, SOUND]
    (tmp_path / "plain").mkdir()
    state = train(config_in(tmp_path, *SHORT, "checkpoint.resume=false"))  # of what others left there
    output = capsys.readouterr().out
    assert "warning: step 4 has loss=nan, grad_norm=nan: parameters, optimizer and balance are left as they" in output
    assert "bad ones in a row: going back to the checkpoint of step 2\n" in output
    expected = train(config_in(tmp_path / "plain", *SHORT))
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(expected))
    assert losses_of(tmp_path) == losses_of(tmp_path / "plain")
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"step": 2, "back_from_step": 5}.items() <= records[2].items()


def test_nan_in_the_memory_of_one_device_is_gone_after_the_rollback(starts, tmp_path, monkeypatch, capsys):
    starts[:] = [SOUND]
    (tmp_path / "plain").mkdir()
    train(config_in(tmp_path, *SHORT, "train.steps=2"))
    monkeypatch.setenv(faults.FOLDER, str(tmp_path))
    (tmp_path / "nan-0").touch()
    state = train(config_in(tmp_path, *SHORT))
    assert "step 4 has loss=nan, grad_norm=nan, the last of train.bad_in_a_row=2" in capsys.readouterr().out
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(train(config_in(tmp_path / "plain", *SHORT))))
    assert losses_of(tmp_path) == losses_of(tmp_path / "plain")


def test_what_comes_again_stops_the_run_and_is_found(starts, tmp_path):
    starts[:] = [FAULTY]
    config = config_in(tmp_path, *SHORT)
    with faults.nan_at(**FAULT), pytest.raises(DivergedError) as stop:
        train(config)
    assert stop.value.exit_code == EXIT_DIVERGED == 3
    assert str(stop.value) == (
        "step 5 has loss=nan, grad_norm=nan, the last of train.bad_in_a_row=2 bad ones in a row, and going back to "
        "the checkpoint of step 2 has not helped: first not finite is the output of block 1 on device 5 (more in "
        f"{tmp_path}/bad_step.json); use an optimizer.learning_rate below 0.001, or more optimizer.warmup_steps"
    )
    assert checkpoints(tmp_path) == ["2"], "none between bad steps"
    found = json.loads((tmp_path / "bad_step.json").read_text())
    assert "experts.up" in " ".join(found.pop("gradients")["block 1"])
    sources = [Samples.of(open_tokens(config.data, config.model.vocab_size)[0], "train", config.data)]
    assert found == {
        **{"step": 5, "loss": "nan", "grad_norm": "nan", "batch": 4},
        "samples": [number for _, number in batch_samples(sources, Mixture.of(config.data, 8, 0), batch=4)],
        **{"first_output": "block 1", "devices": [5], "first_gradient": "block 1", "parameters": {}},
    }


def test_spikes_are_skipped_alike_by_a_run_that_was_stopped_between(tmp_path):
    """Here every loss above the median of those before is one."""
    skipping = ["train.spike_factor=1.00001", "train.skip_spikes=true", "train.bad_in_a_row=null"]
    settings = [*skipping, "checkpoint.every=0", "train.eval_every=0"]
    with compiled_once():
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        expected = train(config_in(tmp_path / "one", *settings, "train.steps=20"))
        train(config_in(tmp_path / "two", *settings, "train.steps=13"))
        state = train(config_in(tmp_path / "two", *settings, "train.steps=20"))
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(expected))
    losses = losses_of(tmp_path / "one")
    assert losses == losses_of(tmp_path / "two")
    bounds = {step: np.median([losses[n] for n in range(1, step - 1)]) * 1.00001 for step in range(10, 21)}
    skipped = {step for step, bound in bounds.items() if losses[step] > bound}
    assert {step < 13 for step in skipped} == {True, False}, "some before the stop, some after it"
    (last,) = [record for record in map(json.loads, lines_of(tmp_path / "one", last=20)) if "bad_steps" in record][-1:]
    assert last["bad_steps"] == len(skipped)


def test_a_block_of_a_later_stage_is_found_with_the_devices_that_have_it():
    config = small_config(1, 2, pipeline=2, grad_accumulation=2, model={"num_layers": 4})
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, mask_documents=True))
    mesh, token_BN1 = mesh_of(config), tokens_of(config)
    mark_documents(token_BN1, end_of_text=5)
    params = first_state(config, make_trainer(config, mesh))["params"]
    with faults.nan_at(step=1, device=3, parameter="segments.0.1.norm"):
        wrong_WP = _outputs(config, mesh)(params, token_BN1, 0, None)
    embedding, *blocks, logits = (set(np.flatnonzero(wrong_P).tolist()) for wrong_P in wrong_WP)
    assert (embedding, blocks[:3], logits) == (set(), [set()] * 3, blocks[3])
    assert blocks[3] == {1, 3}, "every stage computes all blocks, here of the ranks that have the second half of tokens"
