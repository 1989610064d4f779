"""The chunk size of the cross-entropy loss, which the model and the memory planner share.

The logits of one chunk of tokens are in memory at a time.
"""

import functools
import math

_MOST_LOGITS = 2**27  # 512 MiB of 4 bytes each


@functools.lru_cache(maxsize=2**12)
def tokens_of_chunk(tokens: int, vocab_size: int, most: int | None) -> int:
    """Return the number of tokens in a chunk: the largest divisor of `tokens` that is at most `most`.

    `tokens` is the number of tokens of a device or of its microbatch. If `most` is None, a chunk has at most 2²⁷
    logits (512 MiB). If the largest divisor is less than half of `most`, it is not used: then there are as few chunks
    as possible, and the last one is padded.
    """
    if most is None:
        most = max(_MOST_LOGITS // vocab_size, 1)
    divisor = next(size for size in range(min(most, tokens), 0, -1) if tokens % size == 0)
    return divisor if 2 * divisor >= min(most, tokens) else math.ceil(tokens / math.ceil(tokens / most))
