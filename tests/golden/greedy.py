"""The tokens that transformers generates greedily after the first tokens of each sequence in golden.safetensors.

    pip install torch transformers safetensors
    python tests/golden/greedy.py TOKENS LENGTHS FOLDER [FOLDER …]

LENGTHS are those of the prompts, joined by commas. Prints a line of JSON for each folder: a list of tokens for each
sequence, up to TOKENS, without the end of a text.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file


def greedy(folder: Path, count: int, lengths: list[int]) -> list[list[int]]:
    """Return the tokens after each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    end = model.config.eos_token_id
    texts = []
    for tokens, length in zip(load_file(folder / "golden.safetensors")["tokens"].long(), lengths, strict=True):
        prompt = tokens[None, :length]
        settings = {"do_sample": False, "max_new_tokens": count, "eos_token_id": end, "pad_token_id": end}
        new = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, length:].tolist()
        texts.append(new[: new.index(end)] if end in new else new)
    return texts


if __name__ == "__main__":
    for folder in sys.argv[3:]:
        print(json.dumps(greedy(Path(folder), int(sys.argv[1]), json.loads(f"[{sys.argv[2]}]"))))
