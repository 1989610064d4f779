"""Who has a link first: experts, stages, context ranks, sums."""

from moe_jax.schedule.link_order import Priority, finish_times_s


def test_urgent_transfers_are_sent_first() -> None:
    wanted_s = {Priority.DATA: 4.0, Priority.CONTEXT: 0.5, Priority.EXPERT: 1.0, Priority.PIPELINE: 2.0}
    assert finish_times_s(wanted_s) == {
        Priority.EXPERT: 1.0,
        Priority.PIPELINE: 3.0,
        Priority.CONTEXT: 3.5,
        Priority.DATA: 7.5,
    }
    assert finish_times_s({Priority.DATA: 1.0}) == {Priority.DATA: 1.0}
