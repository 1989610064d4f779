"""What compilers keep in memory of their own accord, as programs of jax 0.10.2 show (`profiling/memory_check.py`)."""

from typing import NamedTuple


class Compiler(NamedTuple):
    """What a platform's compiler does of its own accord, read off its programs."""

    pair_bytes: float  # for each query and key of a block that goes backward, beside two numbers of the compute type
    logit_gradients: bool  # beside the logits, in the compute type; else in their place
    head_again: bool  # the head is cast twice, and its input in float32, unless activations leave no room
    turned_heads: bool  # all blocks' queries, keys and values are copied into another layout before the backward loop
    flat_copies: int  # of the head's gradient where a schedule sums it as a flat vector
    rare_copies: int  # of the room for rows beyond a ragged exchange's lanes, for each microbatch
    scheduled_gradients: bool  # of a block are beside those of all blocks, and so are casts of its weights
    gaps: float  # temporaries over what is in use at once, in a plain step
    scheduled_gaps: float  # the same in a scheduled one
    reserved_bytes: int  # counted with temporaries
    casts_of_parts: bool  # of all blocks' weights lie outside of a loop over parts of a batch
    sums_behind_parts: bool  # autodiff's sums of each part are moved behind that loop (ZeRO 2)
    scatters_rows: bool  # an array is laid out rank by rank before its sum is scattered
    parts_apart: bool  # whole gradients of parts before lie apart from the last one's own parts (ZeRO 1)
    slots_at_work: int  # of what forward passes of a pipeline keep, beside their buffers
    slots_at_work_of_pairs: int  # the same where ticks have two passes beside each other


_GPU = Compiler(
    pair_bytes=9,  # gradients of probabilities and of scores in float32, and a mask
    logit_gradients=True,
    head_again=True,
    turned_heads=True,
    flat_copies=0,  # the same bytes
    rare_copies=3,
    scheduled_gradients=False,
    gaps=1.0,
    scheduled_gaps=1.0,
    reserved_bytes=0,
    casts_of_parts=False,
    sums_behind_parts=False,
    scatters_rows=True,
    parts_apart=True,
    slots_at_work=0,
    slots_at_work_of_pairs=1,
)
_TPU = Compiler(
    pair_bytes=9,
    logit_gradients=False,
    head_again=False,
    turned_heads=False,
    flat_copies=1,  # arrays lie in tiles, vectors do not
    rare_copies=3,
    scheduled_gradients=True,
    gaps=1.14,
    scheduled_gaps=1.3,
    reserved_bytes=2**27,  # its vector memory
    casts_of_parts=True,
    sums_behind_parts=True,
    scatters_rows=False,
    parts_apart=False,
    slots_at_work=0,
    slots_at_work_of_pairs=3,
)
COMPILERS = {"gpu": _GPU, "tpu": _TPU, "cpu": _GPU._replace(turned_heads=False)}
