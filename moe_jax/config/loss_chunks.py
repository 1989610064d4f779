"""In which chunks of tokens the cross-entropy is computed: the model and plans of memory have to know.

Sizes: T tokens of a device or of its microbatch, V vocabulary.
"""

import math

_MOST_LOGITS = 2**27  # of 4 bytes each: 512 MiB


def tokens_of_chunk(tokens: int, vocab_size: int, most: int | None) -> int:
    """How many tokens have their logits in memory at a time: the largest divisor of T up to `most`.

    None: with up to 2²⁷ logits, 512 MiB. Where that would be less than half of `most`, chunks are as few as can be, and
    the last is filled up.
    """
    if most is None:
        most = max(_MOST_LOGITS // vocab_size, 1)
    divisor = next(size for size in range(min(most, tokens), 0, -1) if tokens % size == 0)
    return divisor if 2 * divisor >= min(most, tokens) else math.ceil(tokens / math.ceil(tokens / most))
