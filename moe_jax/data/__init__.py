"""Token data: text preparation, tokenizers, and batches in an order that a seed determines."""
