"""What the ops of a block may be cut along, and that planning follows it."""

from collections.abc import Sequence

import pytest

from moe_jax.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from moe_jax.config.draft import open_draft
from moe_jax.plan.axes import CutAxis, Op, find_cut, forward_ops
from moe_jax.plan.candidates import choices, schedules

BATCH = (CutAxis.SEQUENCES, CutAxis.RAGGED)
LAYER = ("dispatch", "expert", "combine")
SCORE = {"gate": "batch_prioritised"}


def ops_of(kinds: Sequence[str] = ("moe",), **moe) -> tuple[Op, ...]:
    return forward_ops(ModelConfig(num_layers=len(kinds), moe=MoEConfig(**moe)), kinds)


def named(ops: Sequence[Op], first: str, last: str) -> list[Op]:
    """From the first op of one name to the last one of another."""
    names = [op.name for op in ops]
    return list(ops[names.index(first) : len(names) - names[::-1].index(last)])


@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "package.module:gate"])
@pytest.mark.parametrize("rest", [{}, {"capacity_factor": None}, {"dispatcher": "einsum"}, {"num_shared_experts": 1}])
def test_gates_that_look_at_one_token_let_the_batch_be_cut_anywhere(gate: str, rest: dict) -> None:
    ops = ops_of(("dense", "moe", "moe"), gate=gate, **rest)
    found = find_cut(ops, BATCH)
    assert found is not None
    rows = {f"{tensor}.{block}" for tensor in ("rows", "received", "made", "returned") for block in (1, 2)}
    assert {tensor for tensor, cut in found.items() if cut is CutAxis.RAGGED} == rows
    assert set(found.values()) == set(BATCH)


def test_slots_of_scores_over_the_whole_batch_can_only_be_cut_after_the_gate() -> None:
    ops = ops_of(("moe", "moe"), **SCORE)
    own, later = ops_of(**SCORE), ops[next(i for i, op in enumerate(ops) if op.name == "dispatch") :]
    later = later[: next(i for i, op in enumerate(later) if op.name == "permute")]
    assert find_cut(own, CutAxis) is None
    assert find_cut(named(own, "permute", "combine"), CutAxis) is None
    assert find_cut(later, BATCH) is not None, "rows of a part of the sequences, up to the next gate"
    assert find_cut(named(own, "norm", "gate"), BATCH) is not None


def test_exchanges_and_experts_alone_are_cut_by_slots() -> None:
    """Not with the ops around them: a token's choices lie in slots of different parts."""
    for moe in ({}, SCORE):
        ops = ops_of(**moe)
        found = find_cut(named(ops, *LAYER[::2]), [CutAxis.SLOTS])
        assert found is not None
        assert set(found.values()) == {CutAxis.SLOTS}
        assert find_cut(named(ops, "permute", "combine"), [CutAxis.SLOTS]) is None
        assert find_cut(named(ops, "combine", "unpermute"), [CutAxis.SLOTS]) is None


@pytest.mark.parametrize(
    ("first", "last", "allowed", "possible"),
    [
        ("projections", "attention", [CutAxis.HEADS], True),
        ("output", "residual", [CutAxis.SEQUENCES], True),
        ("attention", "attention", [CutAxis.TOKENS], True),
        ("norm", "projections", [CutAxis.TOKENS], True),
        # queries could be cut along tokens, but keys and values come from the same norm
        ("norm", "attention", [CutAxis.TOKENS, CutAxis.HEADS, CutAxis.FEATURES], False),
        # parts of heads make terms of a sum
        ("attention", "output", [CutAxis.HEADS, CutAxis.FEATURES], False),
    ],
)
def test_a_tensor_keeps_one_axis(first: str, last: str, allowed: list[CutAxis], possible: bool) -> None:
    ops = named(ops_of(("dense",))[:6], first, last)
    assert (find_cut(ops, allowed) is not None) == possible


def test_what_is_found_satisfies_every_op() -> None:
    ops = ops_of(("moe", "dense", "moe"))
    found = find_cut(ops, CutAxis)
    assert found is not None
    assert all(tuple(found[tensor] for tensor in (*op.reads, *op.writes)) in op.cuts for op in ops)


def test_planning_tries_only_what_a_gate_lets_be_cut() -> None:
    """The constraints agree with what a config may say."""
    for moe in ({}, SCORE):
        experts = MoEConfig(num_experts=16, intermediate_size=512, **moe)
        model = ModelConfig(
            vocab_size=512, hidden_size=256, num_layers=2, num_attention_heads=8, intermediate_size=512, moe=experts
        )
        mesh = MeshConfig(data=1, expert=16)
        config = Config(model=model, mesh=mesh, data=DataConfig(seq_len=256), train=TrainConfig(batch_size=64))
        ways = choices(open_draft(config), config, ({"schedule": each} for each in schedules()))
        tried = [each.schedule for each in ways]
        cut = {each.microbatches for each in tried if each.policy == "unified"} > {1}
        assert cut == (find_cut(forward_ops(model, ("moe", "moe")), BATCH) is not None)
        assert {2, 4, 8} <= {each.microbatches for each in tried if each.policy == "expert_pipeline"}
