"""Which of several ways computes the same, as far as plans of memory have to know.

Sizes: T tokens of a device or of its microbatch, V vocabulary.
"""

_LOGITS = 2**27  # of 4 bytes each: 512 MiB


def tokens_of_chunk(tokens: int, vocab_size: int, most: int | None) -> int:
    """How many tokens have their logits in memory at a time: the largest divisor of T up to `most`.

    None: with up to 2²⁷ logits, 512 MiB.
    """
    if most is None:
        most = max(_LOGITS // vocab_size, 1)
    return next(size for size in range(min(most, tokens), 0, -1) if tokens % size == 0)
