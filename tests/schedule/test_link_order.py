"""Who has a link first: experts, stages, context ranks, sums."""

from moe_jax.schedule.link_order import Traffic, finished_s


def test_urgent_transfers_are_sent_first() -> None:
    wanted_s = {Traffic.DATA: 4.0, Traffic.CONTEXT: 0.5, Traffic.EXPERT: 1.0, Traffic.PIPELINE: 2.0}
    assert finished_s(wanted_s) == {
        Traffic.EXPERT: 1.0,
        Traffic.PIPELINE: 3.0,
        Traffic.CONTEXT: 3.5,
        Traffic.DATA: 7.5,
    }
    assert finished_s({Traffic.DATA: 1.0}) == {Traffic.DATA: 1.0}
