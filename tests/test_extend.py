"""The parts of one's own that docs/extend.md shows: they train, and compute what the reference does."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import MoE
from moe_jax.config_checks.parts import OWN_PARTS
from moe_jax.config_files import load_config
from moe_jax.errors import ConfigError
from moe_jax.models.gates import gate_of, softmax
from moe_jax.models.transformer import Computation
from moe_jax.named import named
from moe_jax.parallel.all_to_all import EXCHANGES, Exchange
from moe_jax.parallel.mesh import make_mesh
from moe_jax.schedule.actions import ScheduleError
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.dependencies import check
from moe_jax.schedule.policies import POLICIES
from moe_jax.train.loop import train
from tests.schedule.steps import nominal
from tests.small import small_config
from tests.train.gradients import assert_equals_reference

DOCS = Path(__file__).parents[1] / "docs" / "extend.md"
LINES = 30  # of each example at most


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that the page's command names, whose files are in the current folder."""
    text = DOCS.read_text()
    files = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", text, re.DOTALL))
    assert len(files) == text.count("```python") == 3
    for name, code in files.items():
        assert len(code.splitlines()) <= LINES, name
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (command,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [word for word in command.split() if "=" in word]


def test_they_train(examples: list[str]) -> None:
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    moe = {"num_experts": 4, "top_k": 2, "hidden_dim": 16}
    settings = {
        "model": {"d_model": 16, "num_layers": 1, "num_heads": 2, "moe": moe},
        "data": {"path": "text.txt", "seq_len": 16},
        "optimizer": {"learning_rate": 0.03, "warmup_steps": 0},
        "train": {"steps": 4, "batch_size": 16, "compute_dtype": "float32", "eval_every": 0, "eval_batches": 1},
        "log": {"dir": "run", "every": 1, "sample_tokens": 0, "tensorboard": False},
    }
    Path("tiny.yaml").write_text(json.dumps(settings))
    train(load_config("tiny.yaml", examples))
    records = map(json.loads, Path("run", "metrics.jsonl").read_text().splitlines())
    losses = [record["cross_entropy"] for record in records if "cross_entropy" in record]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_exchange_and_policy_compute_what_the_reference_does(examples: list[str]) -> None:
    """Loss, counts and every gradient."""
    named = dict(word.split("=") for word in examples)
    schedule = {"policy": named["schedule.policy"], "microbatches": 2, "weight_grad": "greedy"}
    assert_equals_reference(
        small_config(1, 4, schedule=schedule, exchange={"algorithm": named["exchange.algorithm"]}, capacity_factor=0.5)
    )


def test_the_gate_is_a_sharper_softmax(examples: list[str]) -> None:
    moe = MoE(gate="sharp:choose", normalize_weights=False)
    logit_TE = jax.random.normal(jax.random.key(0), (5, moe.num_experts))
    decision = gate_of(moe)({"router": jnp.eye(moe.num_experts)}, logit_TE, None, moe).decision
    for found, expected in zip(decision, softmax.choose(2 * logit_TE, moe), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_policy_begins_with_the_first_microbatch(examples: list[str]) -> None:
    shape = make_shape("first_in:POLICY", ["moe"], 2)
    schedule = make_schedule("first_in:POLICY", shape, nominal(shape).of(shape))
    check(schedule)
    backward = [str(action) for action in schedule.actions if action[:2] == ("B", "expert")]
    assert backward == ["B.expert.0.0", "B.expert.0.1"]


FLAT = EXCHANGES["flat"]
BROKEN = Exchange(FLAT.start, lambda under_way, ranks: 1 // 0)
HALF = Exchange(FLAT.start, lambda under_way, ranks: under_way[0][:1])
WHOLE = POLICIES["unified"]
LESS = WHOLE._replace(orders=lambda shape: {s: t[1:] for s, t in WHOLE.orders(shape).items()})
TWICE = WHOLE._replace(orders=lambda shape: {s: [*t, *t[:1]] for s, t in WHOLE.orders(shape).items()})
MORE = WHOLE._replace(
    orders=lambda shape: {s: [*t, *shape.tasks_of("W", shape.stages[0])] for s, t in WHOLE.orders(shape).items()}
)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LINES", "is of type int: name a moe_jax.parallel.all_to_all.Exchange"),
        ("BROKEN", "cannot be traced on 4 ranks (ZeroDivisionError: integer division or modulo by zero): mend it"),
        ("HALF", "makes bfloat16[1, 3] of bfloat16[4, 3] on 4 ranks: it must be the same"),
    ],
)
def test_what_is_no_exchange_is_refused(name: str, message: str) -> None:
    algorithm = f"{__name__}:{name}"
    config = small_config(2, 4, exchange={"algorithm": algorithm})
    with pytest.raises(ConfigError) as error:
        Computation.of(config, make_mesh(config.mesh))
    assert str(error.value) == f"exchange.algorithm={algorithm} {message}"


def test_a_module_that_cannot_be_imported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfinished.py").write_text("POLICY = (\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        named("schedule.policy", "unfinished:POLICY", POLICIES)
    assert str(error.value) == (
        "schedule.policy=unfinished:POLICY: importing unfinished ends with SyntaxError: '(' was never closed "
        "(unfinished.py, line 1): mend it"
    )


def test_settings_know_every_part() -> None:
    assert {*OWN_PARTS["exchange.algorithm"]} == {*EXCHANGES, "auto", "ragged"}
    assert {*OWN_PARTS["schedule.policy"]} == {*POLICIES}


def test_an_exchange_of_ones_own_is_refused_with_stages() -> None:
    algorithm = f"{__name__}:FLAT"
    with pytest.raises(ConfigError) as error:
        small_config(1, 2, pipeline=2, grad_accumulation=2, exchange={"algorithm": algorithm})
    assert str(error.value) == (
        f"exchange.algorithm={algorithm} may send from rank to rank, which waits for the devices of all "
        "mesh.pipeline=2 stages: use exchange.algorithm=flat or hier_2d"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LINES", " is of type int: name a moe_jax.schedule.policies.protocol.Policy"),
        ("LESS", ": the compute stream leaves out F.embed.0: list it"),
        ("TWICE", ": the compute stream lists a task twice: list each once"),
        ("MORE", ": the compute stream lists W.embed.0, which is none of its tasks: leave it out"),
    ],
)
def test_what_is_no_policy_is_refused(name: str, message: str) -> None:
    policy = f"{__name__}:{name}"
    shape = make_shape("unified", ["moe"], 2)
    with pytest.raises((ConfigError, ScheduleError)) as error:
        make_schedule(policy, shape, nominal(shape).of(shape))
    assert str(error.value) == f"schedule.policy={policy}{message}"
