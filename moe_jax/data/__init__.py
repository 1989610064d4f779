"""Token data: preparing text, tokenizers, and batches in the order of a seed."""
