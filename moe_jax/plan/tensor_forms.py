"""The forms over tensor ranks that a plan tries, each with the number of chunks in which an exchange is shortest."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from moe_jax.config import Config
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.step_times import Step

_CHUNKED: tuple[Literal["sharded_chunked", "sharded_overlapped"], ...] = ("sharded_chunked", "sharded_overlapped")
_MOST_CHUNKS = 64
_SMALLEST_BYTES = 2**20  # of a chunk: links reach their rate with messages of a megabyte, not with smaller ones


def tensor_forms(config: Config, cluster: Cluster) -> Iterator[dict[str, object]]:
    """Settings of the exchange section: each form, the chunked ones with their best number of chunks.

    Numbers of chunks are powers of two up to 64 whose chunks have a megabyte, and 2 where no chunk has.
    """
    step, schedule = Step(config, cluster), config.schedule
    exchanged = step.exchanged_bytes / (schedule.microbatches * schedule.expert_chunks)

    def seconds(form: str, chunks: int) -> float:
        settings: dict[str, Any] = {"tensor_form": form, "tensor_chunks": chunks}
        changed = dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, **settings))
        return Step(changed, cluster).exchanges.seconds(exchanged)

    yield {"tensor_form": "sharded", "tensor_chunks": 1}
    if config.step_facts.orders_tasks:
        yield {"tensor_form": "sharded_scheduled", "tensor_chunks": 1}
    for form in _CHUNKED:
        best, best_s, chunks = 2, seconds(form, 2), 4
        while chunks <= _MOST_CHUNKS and exchanged / chunks >= _SMALLEST_BYTES:
            if (chunks_s := seconds(form, chunks)) < best_s:
                best, best_s = chunks, chunks_s
            chunks *= 2
        yield {"tensor_form": form, "tensor_chunks": best}
