"""A part of `bench_gpu.py`: the same model in Hugging Face transformers, compiled, with grouped products of experts.

Parameters and moments of AdamW are bfloat16, since grouped products compile with no other type; these are fewer bytes
than our float32. Its loss is the cross-entropy alone. Both make its steps shorter, not longer.
"""

import gc
import importlib.util
import itertools
import statistics
import time
from typing import Any

from parts import Put, Values, one_line
from results_file import quartiles, rounded
from rounds import seconds_in_rounds

from moe_jax.measure.provenance import package_version

_EXPERTS = ("grouped_mm", "batched_mm", "sonicmoe", None)  # implementations; None: as the library chooses
_LAST_START = 0.5  # of the time limit: a variant compiles for up to half a minute


def measure(
    put: Put,
    settings: Values,
    sequences: int,
    seq_len: int,
    flops_per_token: float,
    rates: Values,
    clock_s: float,
    limit_s: float,
) -> None:
    """Time the implementations of experts, compiled and then eager, and keep the fastest.

    The number of sequences is halved whenever memory runs out. After the first result none starts in the second half of
    the time limit.
    """
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return put({"skipped": f"{' and '.join(missing)} not installed"})
    import torch

    start = time.monotonic()
    put({"versions": {name: package_version(name) for name in ("torch", "transformers", "triton")}})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    best, tokens_per_s, refused = 0.0, dict[str, float](), dict[str, str]()
    for is_compiled, experts in itertools.product((True, False)[device == "cpu" :], _EXPERTS):
        if best and time.monotonic() - start > _LAST_START * limit_s:
            break
        name = f"{'compiled' if is_compiled else 'eager'}, experts: {experts or 'as the library chooses'}"
        for count in (sequences >> halved for halved in range(sequences.bit_length())):
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                found = _times(settings, device, is_compiled, experts, count, seq_len, clock_s)
            except Exception as error:
                refused[f"{name}, {count} sequences"] = one_line(error)
                put({"refused": refused})
                is_full = isinstance(error, torch.OutOfMemoryError)
            else:
                tokens_per_s[name] = rounded(count * seq_len / statistics.median(found["times"]))
                put({"tokens_per_s_of": tokens_per_s})
                if tokens_per_s[name] > best:
                    best = tokens_per_s[name]
                    put(
                        {
                            "variant": name,
                            "sequences": count,
                            "step_s": quartiles(found["times"]),
                            "first_step_s": rounded(found["first_step_s"]),
                            "tokens_per_s": best,
                            "mfu": rounded(best * flops_per_token / rates["matrix_flops_per_s"]),
                            "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
                        }
                    )
                is_full = False
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
            if not is_full:
                break
    if not best:
        raise RuntimeError("no variant works, see refused")
    return None


def _times(
    settings: Values, device: str, is_compiled: bool, experts: str | None, sequences: int, seq_len: int, clock_s: float
) -> Values:
    """Return the seconds of the first step, and seconds per step in each round."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {} if experts is None else {"experts_implementation": experts}
    config = AutoConfig.for_model(**settings, use_cache=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa", **options)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model) if is_compiled else model
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (sequences, seq_len), device=device)

    def step() -> Any:
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def seconds(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        float(loss.detach())
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    first_step_s = seconds(1)
    seconds(1)
    return {"first_step_s": first_step_s, "times": seconds_in_rounds(seconds, clock_s)}
