"""Greedy tokens of transformers, with times: a part of profiling/generate_speed.py, for an environment without moe_jax.

    python tests/golden/timed.py FOLDER TOKENS

Reads a line of JSON with prompts of equal length for each batch, and answers with one: the new tokens, the seconds to
the first one and in all, those of the CPU, and the implementation of experts, which is the fastest one for the first
batch.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import transformers

EXPERTS = ("eager", "batched_mm", "grouped_mm")


class Clock(transformers.StoppingCriteria):
    """Stops nothing; notes when the first token is there."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.first = self.first or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generated(model: Any, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """Return the tokens after each prompt, and seconds."""
    tokens, clock = torch.tensor(prompts), Clock()
    # a token that is none, so that no text ends early
    settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None}
    start, cpu_s = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        new = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), stopping_criteria=[clock], pad_token_id=0, **settings
        )
    end, cpu_s = time.perf_counter(), time.process_time() - cpu_s
    assert clock.first is not None
    own = new[:, tokens.shape[1] :].tolist()
    return {"tokens": own, "first_s": clock.first - start, "seconds": end - start, "cpu_s": cpu_s}


def main() -> None:
    """Answer until the input ends."""
    folder, count = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    fastest = ""
    for line in sys.stdin:
        prompts = json.loads(line)
        if not fastest:
            seconds = {}
            for name in EXPERTS:
                model.set_experts_implementation(name)
                generated(model, prompts, 2)
                seconds[name] = generated(model, prompts, count)["seconds"]
            fastest = min(seconds, key=lambda name: seconds[name])
            print(seconds, file=sys.stderr)
            model.set_experts_implementation(fastest)
        print(json.dumps(generated(model, prompts, count) | {"experts": fastest}), flush=True)


if __name__ == "__main__":
    main()
