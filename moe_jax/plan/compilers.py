"""Memory that compilers use beyond what the model needs.

All of it was read off programs of jax 0.10.2 (`profiling/memory_check.py`).
"""

from typing import NamedTuple


class Compiler(NamedTuple):
    """Memory-related behaviour of a platform's compiler, read off its programs."""

    pair_bytes: float  # per (query, key) pair in a block's backward pass, beyond two numbers of the compute dtype
    logit_gradients: bool  # have a buffer of their own, in the compute dtype; else they overwrite the logits
    recasts_head: bool  # the head is cast twice, and its input in float32, unless activations fill the memory
    transposed_heads: bool  # queries, keys and values of all blocks are copied to another layout before backward
    flat_copies: int  # of the head's gradient if a schedule sums it as a flat vector
    overflow_copies: int  # of the buffer for rows beyond a ragged exchange's lanes, per microbatch
    row_copies: int  # of the experts' rows in the backward pass of what was recomputed
    own_gradients: bool  # also without a loop, a block's gradients and casts have buffers besides those of all blocks
    stacks_first: bool  # gradients of all blocks are allocated before the blocks above a loop run backward
    exchange_targets: bool  # what a block's exchanges fill exists at once, in a loop's backward pass (ZeRO 0 to 2)
    gaps: float  # ratio of allocated temporaries to those in use at once
    pipelined_bytes: int  # counted with a pipelined step's temporaries
    casts_of_blocks: bool  # a plain step with remat casts the weights of all blocks before its loops (ZeRO 0 to 2)
    casts_of_parts: bool  # weights of all blocks are cast once, outside of the loop over parts of a batch
    casts_of_shards: bool  # shards of all blocks are cast once, outside of the loop over blocks (ZeRO 3)
    transposes_of_shards: bool  # those of all experts are transposed once, before the loop over blocks (ZeRO 3)
    sums_after_parts: bool  # autodiff's sums of each part are moved after that loop (ZeRO 2)
    scatters_rows: bool  # an array is laid out rank by rank before its sum is scattered
    parts_apart: bool  # whole gradients of earlier parts and those of the last one have separate buffers (ZeRO 0 and 1)
    extra_slots: int  # of activations of a pipeline's forward passes, beyond the buffers of its table
    extra_slots_of_pairs: int  # the same if ticks have two concurrent passes


_GPU = Compiler(
    pair_bytes=9,  # gradients of probabilities and of scores in float32, and a mask
    logit_gradients=True,
    recasts_head=True,
    transposed_heads=True,
    flat_copies=0,  # the same bytes
    overflow_copies=3,
    row_copies=3,
    own_gradients=False,
    stacks_first=False,
    exchange_targets=False,
    gaps=1.0,
    pipelined_bytes=0,
    casts_of_blocks=False,
    casts_of_parts=False,
    casts_of_shards=False,
    transposes_of_shards=True,
    sums_after_parts=False,
    scatters_rows=True,
    parts_apart=True,
    extra_slots=0,
    extra_slots_of_pairs=1,
)
_TPU = Compiler(
    pair_bytes=9,
    logit_gradients=True,
    recasts_head=False,
    transposed_heads=False,
    flat_copies=1,  # arrays are stored in tiles, vectors are not
    overflow_copies=3,
    row_copies=1,
    own_gradients=True,
    stacks_first=True,
    exchange_targets=True,
    gaps=1.02,
    pipelined_bytes=50 * 10**6,
    casts_of_blocks=True,
    casts_of_parts=True,
    casts_of_shards=True,
    transposes_of_shards=False,
    sums_after_parts=True,
    scatters_rows=False,
    parts_apart=False,
    extra_slots=0,
    extra_slots_of_pairs=3,
)
COMPILERS = {"gpu": _GPU, "tpu": _TPU, "cpu": _GPU._replace(transposed_heads=False)}
