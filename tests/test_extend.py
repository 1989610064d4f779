"""The custom parts that docs/extend.md shows: they train, and compute what the reference does."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moe_jax.cli import plan
from moe_jax.config import MoEConfig, OptimizerConfig
from moe_jax.config.plugins import load_part
from moe_jax.config.validate.plugins import BUILT_IN_PARTS
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import ConfigError
from moe_jax.models.dispatchers import dispatcher_of
from moe_jax.models.dispatchers.protocol import ExpertRows, TokenDispatcher
from moe_jax.models.gates import gate_of, softmax
from moe_jax.models.hooks import hooks_of
from moe_jax.models.hooks.protocol import Hooks, WireCodec
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.all_to_all import EXCHANGES, Exchange
from moe_jax.parallel.mesh import make_mesh
from moe_jax.run.loop import train
from moe_jax.schedule.actions import ScheduleError, Stream
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.dependencies import check
from moe_jax.schedule.policies import POLICIES
from moe_jax.schedule.scanned import ScannedBlocks, make_scanned
from moe_jax.step.optimizers import scale_of
from moe_jax.step.optimizers.protocol import Parameter
from tests.schedule.steps import nominal
from tests.small import small_config
from tests.step.gradients import assert_equals_reference

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
    return [word for word in commands()[0] if "=" in word]


def commands() -> list[list[str]]:
    """The words of the page's commands: one trains, the other one draws."""
    train, plan = re.findall(r"```sh\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return [shlex.split(command.replace("\\\n", "")) for command in (train, plan)]


@pytest.mark.usefixtures("examples")
def test_a_plan_draws_the_order_with_all_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    words = commands()[1][3:]
    words[words.index("--model") + 1] = str(DOCS.parents[1] / "configs/shakespeare_cpu.yaml")
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    plan.main()
    assert Path("plans/first.png").exists()
    planned, given = load_config("plans/first.yaml"), [word for word in words if word.startswith("schedule.")]
    assert given
    assert load_config("plans/first.yaml", given) == planned, "the plan leaves them as they are"


def test_they_train(examples: list[str]) -> None:
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    moe = {"num_experts": 4, "top_k": 2, "intermediate_size": 16}
    settings = {
        "model": {"hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "moe": moe},
        "data": {"path": "text.txt", "seq_len": 16},
        "optimizer": {"learning_rate": 0.03, "warmup_steps": 0},
        "train": {"steps": 4, "batch_size": 16, "compute_dtype": "float32", "eval_every": 0, "eval_batches": 1},
        "log": {"every": 1, "sample_tokens": 0, "tensorboard": False},
    }
    Path("tiny.yaml").write_text(json.dumps(settings))
    config = load_config("tiny.yaml", examples)
    train(config)
    records = map(json.loads, Path(config.log.dir, "metrics.jsonl").read_text().splitlines())
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
    moe = MoEConfig(gate="sharp:choose", norm_topk_prob=False)
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


def divide() -> int:
    return 1 // 0


# the innermost line of a user's file, which is this one
PLACE = f" (tests/test_extend.py, line {divide.__code__.co_firstlineno + 1})"
DIVIDED = f"ZeroDivisionError: integer division or modulo by zero{PLACE}"
BROKEN = Exchange(FLAT.start, lambda under_way, ranks: divide())
HALF = Exchange(FLAT.start, lambda under_way, ranks: under_way[0][:1])
WHOLE = POLICIES["unified"]
LESS = WHOLE._replace(orders=lambda shape: {s: t[1:] for s, t in WHOLE.orders(shape).items()})
TWICE = WHOLE._replace(orders=lambda shape: {s: [*t, *t[:1]] for s, t in WHOLE.orders(shape).items()})
MORE = WHOLE._replace(
    orders=lambda shape: {s: [*t, *shape.tasks_of("W", shape.stages[0])] for s, t in WHOLE.orders(shape).items()}
)
EARLY = WHOLE._replace(orders=lambda shape: {s: [*t[-1:], *t[:-1]] for s, t in WHOLE.orders(shape).items()})
CROSSED = WHOLE._replace(
    orders=lambda shape: {s: t if s == Stream.COMPUTE else t[::-1] for s, t in WHOLE.orders(shape).items()}
)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LINES", "is of type int: name a moe_jax.parallel.all_to_all.Exchange"),
        ("BROKEN", f"cannot be traced on 4 ranks ({DIVIDED.removesuffix(PLACE)}){PLACE}: fix it"),
        ("HALF", "makes bfloat16[1, 3] of bfloat16[4, 3] on 4 ranks: it must be the same"),
    ],
)
def test_what_is_no_exchange_is_refused(name: str, message: str) -> None:
    algorithm = f"{__name__}:{name}"
    config = small_config(2, 4, exchange={"algorithm": algorithm})
    with pytest.raises(ConfigError) as error:
        ComputeConfig.of(config, make_mesh(config.mesh))
    assert str(error.value) == f"exchange.algorithm={algorithm} {message}"


def test_a_module_that_cannot_be_imported_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfinished.py").write_text("POLICY = (\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_part("schedule.policy", "unfinished:POLICY", POLICIES)
    assert str(error.value) == (
        "schedule.policy=unfinished:POLICY: importing unfinished ends with SyntaxError: '(' was never closed "
        "(unfinished.py, line 1): fix it"
    )


def test_an_error_in_another_file_of_the_user_names_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums.py").write_text("import jax.numpy as jnp\n\ndef add(x):\n    return jnp.reshape(x, (5, 7))\n")
    (tmp_path / "own.py").write_text("import sums\n\ndef choose(logit_TE, moe):\n    return sums.add(logit_TE)\n")
    (tmp_path / "undefined.py").write_text("one = 1\ntwo = tow\n")
    monkeypatch.syspath_prepend(tmp_path)
    with monkeypatch.context() as inside:
        inside.chdir(tmp_path)
        with pytest.raises(ConfigError, match=r" ends with TypeError: cannot reshape .* \(sums.py, line 4\): it must "):
            gate_of(MoEConfig(gate="own:choose"))
    with pytest.raises(ConfigError, match=rf" \({re.escape(str(tmp_path))}/undefined.py, line 2\): fix it"):
        load_part("model.moe.gate", "undefined:choose", {})


def test_settings_know_every_part() -> None:
    assert {*BUILT_IN_PARTS["exchange.algorithm"]} == {*EXCHANGES, "auto", "ragged"}
    assert {*BUILT_IN_PARTS["schedule.policy"]} == {*POLICIES}


def signum(optimizer, parameters, platform):
    return optax.chain(optax.trace(optimizer.momentum), optax.scale_by_sign())


def of_another_type(optimizer, parameters, platform):
    return optax.stateless(lambda updates, _: jax.tree.map(lambda x: x.astype(jnp.bfloat16), updates))


def of_rows(optimizer, parameters, platform):
    return optax.sm3(0.1)


def fails(optimizer, parameters, platform):
    return optax.trace(optimizer.beta)


NO_FUNCTION = 3


def test_an_optimizer_of_ones_own_keeps_its_moments_in_a_bad_step() -> None:
    config = OptimizerConfig(name=f"{__name__}:signum", momentum=0.5)
    up = {"up": jnp.float32([[1, -3]])}
    made = scale_of(config)(config, {"up": Parameter(("model", "hidden"))}, "cpu")
    updates, state = made.update(up, made.init(up), up, is_good=jnp.bool_(True))
    assert updates["up"].tolist() == [[1, -1]]
    _, after = made.update({"up": jnp.nan * up["up"]}, state, up, is_good=jnp.bool_(False))
    assert after[0].trace["up"].tolist() == state[0].trace["up"].tolist() == [[1, -3]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NO_FUNCTION", " is of type int: name a function"),
        ("signum", ""),
        ("of_another_type", " makes {'up': ShapeDtypeStruct(shape=(4, 6), dtype=bfloat16)} of gradients "),
        ("of_rows", " has float32[4] as [0].mu['up'][0]: use trees like the parameters"),
        (
            "fails",
            " ends with AttributeError: 'OptimizerConfig' object has no attribute 'beta' (tests/test_extend.py, ",
        ),
    ],
)
def test_what_is_no_optimizer_is_refused(name: str, message: str) -> None:
    config = OptimizerConfig(name=f"{__name__}:{name}")
    if not message:
        scale_of(config)
        return
    with pytest.raises(ConfigError) as error:
        scale_of(config)
    assert str(error.value).startswith(f"optimizer.name={__name__}:{name}{message}")


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
        ("LESS", ": the compute stream leaves out F.embed.0 (2 microbatches, 2 chunks): list it"),
        ("TWICE", ": the compute stream lists a task twice: list each once"),
        (
            "MORE",
            ": the compute stream lists W.embed.0 (2 microbatches, 2 chunks), which is none of its tasks: leave it out",
        ),
    ],
)
def test_what_is_no_policy_is_refused(name: str, message: str) -> None:
    policy = f"{__name__}:{name}"
    shape = make_shape("unified", ["moe"], 2)
    with pytest.raises((ConfigError, ScheduleError)) as error:
        make_schedule(policy, shape, nominal(shape).of(shape))
    assert str(error.value) == f"schedule.policy={policy}{message}"


@pytest.mark.parametrize("weight_grad", ["inline", "greedy"])
@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("EARLY", r": B\.embed\.0 is before B\.attend\.0\.0, which it needs: move it after"),
        (
            "CROSSED",
            r": tasks wait for each other for ever \(.*F\.expert\.0\.0 for F\.dispatch\.0\.0.*\): reorder them",
        ),
    ],
)
def test_tasks_before_what_they_need_are_refused(name: str, message: str, blocks: int, weight_grad: str) -> None:
    """In scanned blocks, too, whose tasks are regrouped, and where weight gradients are placed."""
    policy, shape = f"{__name__}:{name}", make_shape("unified", ["moe"] * blocks, 2, weight_grad=weight_grad)
    scanned = [ScannedBlocks(1, 1, 3)] if blocks > 1 else []
    make: Any = make_scanned if scanned else make_schedule
    with pytest.raises(ScheduleError, match=f"^schedule.policy={policy}{message}$"):
        make(policy, shape, *scanned, nominal(shape).of(shape))


GATE = (
    "it must take router logits [T, E] and the MoEConfig settings, and return a moe_jax.models.gates.choice.TopKRouting"
)
ENCODE = "encode must take rows [P, …, D] and return an array that keeps P"
LAYER = "it must take rows [T, D] and return rows of the same shape and type"
PARTS = "it must take a whole number and return moe_jax.schedule.shape.Parts of two whole numbers from 1 to 65536"
TASKS = "it must take a moe_jax.schedule.shape.StepShape and return a list of tasks for each stream"
GATES = {
    "few": (
        lambda logit_TE: logit_TE,
        f"ends with TypeError: <lambda>() takes 1 positional argument but 2 were given: {GATE}",
    ),
    "nothing": (lambda logit_TE, moe: None, "returns NoneType: return a moe_jax.models.gates.choice.TopKRouting"),
    "fails": (lambda logit_TE, moe: divide(), f"ends with {DIVIDED}: {GATE}"),
    "flat": (
        lambda logit_TE, moe: softmax.choose(logit_TE, moe)._replace(weight_Tk=logit_TE[:, 0]),
        "makes weight_Tk float32[9] of 9 tokens' logits: it must be float32[9, 2]",
    ),
}
HOOKS = {
    "shorter": (
        Hooks(before_layer=lambda x_TD: x_TD[:1]),
        f"before_layer makes bfloat16[1, 128] of bfloat16[24, 128]: {LAYER}",
    ),
    "unranked": (
        Hooks(dispatch=WireCodec(encode=lambda rows: rows[0])),
        f"dispatch makes bfloat16[4, 128] of bfloat16[2, 4, 128]: {ENCODE}",
    ),
    "a_number": (Hooks(combine=3), "combine is of type int: use a moe_jax.models.hooks.protocol.WireCodec"),
}
POLICY = {
    "partless": (WHOLE._replace(parts=lambda degree: None), f"parts returns None for 2: {PARTS}"),
    "too_fine": (WHOLE._replace(parts=lambda degree: (1, 10**9)), f"parts returns (1, 1000000000) for 2: {PARTS}"),
    "no_lists": (
        WHOLE._replace(orders=lambda shape: {"compute": [1]}),
        f"orders returns no lists of tasks by stream: {TASKS}",
    ),
    "broken": (
        WHOLE._replace(orders=lambda shape: divide()),
        f"orders ends with {DIVIDED}: {TASKS}",
    ),
}


class Nothing(NamedTuple):
    num_dropped: jax.Array


# sends all tokens to the only rank, and takes back what comes
AS_THEY_ARE = TokenDispatcher(
    permute=lambda x_TD, *_: (ExpertRows(x_TD[None]), Nothing(jnp.int32(0))),
    experts=lambda params, received, moe, product: received.rows,
    unpermute=lambda returned, metadata: returned[0],
    split=lambda sent, pieces: [sent],
    slot_axis=1,
)
DISPATCHER = {
    "pairless": (
        AS_THEY_ARE._replace(permute=lambda *_: None),
        "permute returns NoneType: return ExpertRows and metadata",
    ),
    "bare": (
        AS_THEY_ARE._replace(permute=lambda x_TD, *_: ([x_TD[None]], Nothing(jnp.int32(0)))),
        "permute returns list to send: return moe_jax.models.dispatchers.protocol.ExpertRows",
    ),
    "uncounted": (
        AS_THEY_ARE._replace(permute=lambda x_TD, *_: (ExpertRows(x_TD[None]), ())),
        "permute returns tuple as metadata: return a NamedTuple with num_dropped",
    ),
    "cut_short": (
        AS_THEY_ARE._replace(unpermute=lambda returned, metadata: returned[0, :3]),
        "unpermute returns (3, 4) for 6 tokens of width 4: return a weighted sum of each, [T, D]",
    ),
    "narrow": (
        AS_THEY_ARE._replace(experts=lambda params, received, moe, product: received.rows[..., :1]),
        "experts returns (1, 6, 1) for received rows (1, 6, 4): return outputs of the same shape",
    ),
    "unwilling": (
        AS_THEY_ARE._replace(permute=lambda x_TD: x_TD),
        "permute ends with TypeError: <lambda>() takes 1 positional argument but 5 were given: "
        "moe_jax/models/dispatchers/__init__.py says what the four functions take",
    ),
}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], str]:
    """Puts a part into this module, and tells how settings name it."""

    def put(name: str, part: object) -> str:
        monkeypatch.setattr(sys.modules[__name__], name, part, raising=False)
        return f"{__name__}:{name}"

    return put


@pytest.mark.parametrize("name", GATES)
def test_a_gate_of_another_form_is_named(name: str, elsewhere: Callable[[str, object], str]) -> None:
    gate = elsewhere(name, GATES[name][0])
    with pytest.raises(ConfigError) as error:
        gate_of(MoEConfig(gate=gate))
    assert str(error.value) == f"model.moe.gate={gate} {GATES[name][1]}"


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_another_form_are_named(name: str, elsewhere: Callable[[str, object], str]) -> None:
    hooks = elsewhere(name, HOOKS[name][0])
    with pytest.raises(ConfigError) as error:
        hooks_of(MoEConfig(hooks=hooks))
    assert str(error.value) == f"model.moe.hooks={hooks}: {HOOKS[name][1]}"


@pytest.mark.parametrize("name", POLICY)
def test_a_policy_of_another_form_is_named(name: str, elsewhere: Callable[[str, object], str]) -> None:
    policy, known = elsewhere(name, POLICY[name][0]), make_shape("unified", ["moe"], 2)
    with pytest.raises(ConfigError) as error:
        make_schedule(policy, make_shape(policy, ["moe"], 2), nominal(known).of(known))
    assert str(error.value) == f"schedule.policy={policy}: {POLICY[name][1]}"


@pytest.mark.parametrize("name", DISPATCHER)
def test_a_dispatcher_of_another_form_is_named(name: str, elsewhere: Callable[[str, object], str]) -> None:
    own = elsewhere(name, DISPATCHER[name][0])
    dispatcher, x_TD = dispatcher_of(MoEConfig(dispatcher=own)), jnp.zeros((6, 4))
    with pytest.raises(ConfigError) as error:
        dispatcher.experts(None, dispatcher.permute(x_TD, None, None, None, None)[0], None, None)
    assert str(error.value) == f"model.moe.dispatcher={own}: {DISPATCHER[name][1]}"
