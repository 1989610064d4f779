"""Settings on the command line of a reader of a run that it does not read. They are reported, as a run reports its own.

`moe_jax.run.describe.unused` has those of a run.
"""

from collections.abc import Sequence

# Settings, or beginnings of their names, that a reader reads or compares with the run's.
_MODEL = ("model.", "mesh.", "data.", "schedule.pipeline", "schedule.virtual_stages", "schedule.head_blocks")
_PARAMETERS = ("optimizer.ema_decay", "train.compute_dtype", "train.init_from", "train.seed")
GENERATION = (*_MODEL, *_PARAMETERS)
_STEP = ("schedule.", "exchange.", "optimizer.zero", "train.attention_kernel", "train.grouped_product")
_BATCH = ("train.batch_size", "train.eval_batches", "train.grad_accumulation", "train.loss_chunk")
EVALUATION = (*GENERATION, *_STEP, *_BATCH)


def unread_text(overrides: Sequence[str], read: Sequence[str], reader: str) -> str:
    """Return a line with the settings of overrides that are not among those `read`; empty without any."""
    names = dict.fromkeys(each.partition("=")[0] for each in overrides)
    unread = [name for name in names if not name.startswith(tuple(read))]
    if not unread:
        return ""
    return f"unused: {', '.join(unread)}, as {reader} does not read {'it' if len(unread) == 1 else 'them'}"
