"""Do compilers allocate the memory that plan/memory.py predicts? python profiling/memory_check.py KIND... (v5p, v5e,
h100)

Compiles training steps of several models, meshes, schedules and rematerialisation settings for 4 to 64 devices, ahead
of time and without the hardware. Compares the bytes that the compiler allocates on each device with the predicted ones,
and with formulas of papers. Takes about a minute each for TPUs, 15 seconds for GPUs. Cases that
results/memory_KIND.json holds already are not compiled again; delete it to start over. Writes that file and
results/memory_KIND.png.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from memory_published import monta_bytes, piper_bytes
from results_file import RESULTS

from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, run_command
from moe_jax.measure.provenance import origin
from moe_jax.measure.targets import Target, check_compiler, find_target
from moe_jax.plan.memory import step_memory
from moe_jax.report.compiled import CompileError, Job, compile_job

CONFIG = str(Path(__file__).parents[1] / "configs" / "bench" / "fine_grained.yaml")
_LAYOUTS = {
    "v5p": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 64: "4x4x4"},
    "v5e": {4: "2x2", 8: "2x4", 16: "4x4", 64: "8x8"},
    "h100": {4: "1x1x4", 8: "1x1x8", 16: "1x2x8", 64: "1x8x8"},
}
MODELS = {
    "coarse": "hidden_size=1024 num_layers=4 num_attention_heads=8 vocab_size=32000 moe.num_experts=16 moe.top_k=2 "
    "moe.intermediate_size=1024",
    "fine": "hidden_size=1024 num_layers=6 num_attention_heads=8 vocab_size=8192 moe.num_experts=64 moe.top_k=6 "
    "moe.intermediate_size=512",
    "deep": "hidden_size=512 num_layers=8 num_attention_heads=4 vocab_size=256 moe.num_experts=64 moe.top_k=2 "
    "moe.intermediate_size=2048",
    "wide": "hidden_size=2048 num_layers=3 num_attention_heads=16 vocab_size=32000 moe.num_experts=8 moe.top_k=2 "
    "moe.intermediate_size=4096",
    "mixed": "hidden_size=1024 num_layers=7 num_attention_heads=16 num_key_value_heads=4 head_dim=128 qk_norm=true "
    "intermediate_size=4096 "
    "vocab_size=16384 moe.num_experts=32 moe.top_k=4 moe.intermediate_size=1024 moe.num_shared_experts=1 "
    "moe.first_k_dense_replace=1 moe.moe_layer_freq=2",
    "gelu": "hidden_size=768 num_layers=6 num_attention_heads=12 vocab_size=50304 activation=gelu "
    "tie_word_embeddings=true "
    "moe.num_experts=16 moe.top_k=1 moe.intermediate_size=3072",
    "dense": "hidden_size=1024 num_layers=4 num_attention_heads=8 vocab_size=32000 intermediate_size=4096 "
    "moe.num_experts=0",
    "dropless": "hidden_size=1024 num_layers=4 num_attention_heads=8 vocab_size=32000 moe.num_experts=16 moe.top_k=2 "
    "moe.intermediate_size=1024 moe.capacity_factor=null",
}
PLAIN = "policy=vanilla microbatches=1 weight_grad=inline grad_reduce=end bucket_cap_mb=null unroll=1 "
_UNIFIED = "policy=unified weight_grad=greedy grad_reduce=bucketed bucket_cap_mb=9 unroll=1 "
_PIPELINE = "policy=expert_pipeline weight_grad=inline grad_reduce=end bucket_cap_mb=null unroll=1 microbatches=2"
# model, data × expert × tensor, sequences per device, their length, schedule, and other settings
_CASES = [
    ("coarse", (1, 8, 1), 2, 1024, PLAIN),
    ("coarse", (1, 8, 1), 2, 1024, _UNIFIED + "microbatches=2"),
    ("coarse", (2, 4, 1), 4, 512, PLAIN + "remat=dots"),
    ("coarse", (1, 4, 1), 2, 1024, PLAIN + "remat=full"),
    ("fine", (1, 8, 1), 4, 1024, PLAIN),
    ("fine", (1, 8, 1), 4, 1024, _UNIFIED + "microbatches=2"),
    ("mixed", (1, 8, 1), 2, 1024, PLAIN),
    ("dense", (8, 1, 1), 2, 1024, PLAIN),
    ("dropless", (1, 4, 1), 2, 1024, PLAIN),
    ("gelu", (1, 4, 1), 4, 1024, PLAIN + "remat=full", "train.loss_chunk=4096"),
    ("deep", (1, 16, 1), 8, 512, _UNIFIED + "microbatches=2"),
    ("mixed", (2, 4, 1), 4, 512, _UNIFIED + "microbatches=2"),
    ("fine", (1, 64, 1), 2, 2048, PLAIN + "remat=full"),
    ("deep", (4, 16, 1), 16, 256, _UNIFIED + "microbatches=2 remat=full"),
    ("wide", (1, 4, 1), 2, 1024, _UNIFIED + "microbatches=2"),
    ("coarse", (1, 4, 2), 4, 1024, PLAIN),
    ("coarse", (8, 8, 1), 2, 1024, PLAIN),
    ("fine", (1, 8, 1), 4, 1024, _UNIFIED + "microbatches=4"),
    ("deep", (1, 16, 1), 8, 512, PLAIN),
    ("fine", (1, 8, 1), 2, 2048, _PIPELINE),
    ("coarse", (1, 8, 1), 2, 1024, _UNIFIED.replace("unroll=1", "unroll=4") + "microbatches=2"),
    ("wide", (1, 8, 1), 4, 2048, _UNIFIED.replace("unroll=1", "unroll=3") + "microbatches=2"),
    ("mixed", (1, 8, 1), 4, 1024, PLAIN + "remat=full"),
    ("wide", (1, 4, 2), 2, 2048, PLAIN + "remat=full"),
    ("dropless", (1, 8, 1), 4, 1024, PLAIN + "remat=full"),
    ("deep", (2, 4, 1), 4, 512, PLAIN, "optimizer.zero=1"),
    ("deep", (2, 4, 1), 4, 512, PLAIN + "remat=full", "optimizer.zero=1"),
    ("deep", (2, 4, 1), 4, 512, _UNIFIED + "microbatches=2", "optimizer.zero=1"),
    ("deep", (2, 4, 1), 8, 512, PLAIN, "optimizer.zero=1 train.grad_accumulation=2"),
    ("deep", (2, 4, 1), 8, 512, _UNIFIED + "microbatches=2", "train.grad_accumulation=2"),
    ("deep", (2, 4, 1), 8, 512, _UNIFIED + "microbatches=2", "optimizer.zero=1 train.grad_accumulation=2"),
    ("deep", (2, 4, 1), 8, 512, PLAIN, "optimizer.zero=2 train.grad_accumulation=2"),
    ("deep", (2, 4, 1), 8, 512, _UNIFIED + "microbatches=2", "optimizer.zero=2 train.grad_accumulation=2"),
    ("gelu", (1, 4, 1), 4, 1024, PLAIN + "remat=full"),
    ("deep", (2, 4, 1), 4, 512, PLAIN + "remat=full", "optimizer.zero=3"),
    ("deep", (2, 4, 1), 4, 512, _UNIFIED + "microbatches=2", "optimizer.zero=3"),
    # here and below with as many tokens: most memory is for hidden values of experts, which are recomputed
    ("wide", (1, 8, 1), 8, 2048, PLAIN + "remat=full", "train.loss_chunk=2048"),
]
_GPU_CASES = [  # XLA:GPU computes weight gradients of all blocks at the end while memory is free
    ("wide", (1, 8, 1), 8, 2048, _UNIFIED + "microbatches=2 remat=full memory_percent=6", "train.loss_chunk=2048"),
    ("wide", (1, 8, 1), 8, 2048, _UNIFIED + "microbatches=4 remat=full memory_percent=6", "train.loss_chunk=2048"),
]
_TPU_CASES = [
    ("wide", (1, 8, 1), 8, 2048, _UNIFIED + "microbatches=2 remat=full", "train.loss_chunk=2048"),
    ("wide", (1, 8, 1), 8, 2048, _UNIFIED + "microbatches=4 remat=full", "train.loss_chunk=2048"),
    ("coarse", (1, 4, 1), 2, 2048, PLAIN),
    ("mixed", (1, 4, 1), 2, 2048, PLAIN + "remat=full"),
    ("fine", (1, 4, 1), 2, 2048, _UNIFIED + "microbatches=2"),
]


def case_of(case: tuple[Any, ...]) -> tuple[str, list[str], int]:
    """Return the name, the settings and the number of devices of a case."""
    model, (data, expert, tensor), sequences, length, schedule, *others = case
    more = " ".join(others).split()
    settings = [f"model.{setting}" for setting in MODELS[model].split()]
    settings += [f"mesh.data={data}", f"mesh.expert={expert}", f"mesh.tensor={tensor}"]
    settings += [f"train.batch_size={sequences * data * expert}", f"data.seq_len={length}"]
    settings += [*(f"schedule.{setting}" for setting in schedule.split()), *more]
    policy = schedule.split()[0].removeprefix("policy=").replace("vanilla", "plain")
    kept = ("microbatches", "remat", "unroll=3", "unroll=4", "memory_percent")
    shown = [each for each in schedule.split() if each.startswith(kept)]
    shown += [setting.partition(".")[-1] for setting in more]
    words = [model, f"{data}x{expert}x{tensor}", f"{sequences}x{length}", policy, *shown]
    return " ".join(word for word in words if word != "microbatches=1"), settings, data * expert * tensor


def compiled_bytes(target: Target, settings: list[str]) -> dict[str, Any]:
    """Compile a step and return the bytes that the compiler allocates on a device."""
    _, outcome = compile_job(target, Job(target=target.name, config=CONFIG, overrides=settings, options={}))
    return {
        "argument_bytes": outcome.argument_bytes,
        "temporary_bytes": outcome.temporary_bytes,
        "result_bytes": outcome.result_bytes,
        "peak_bytes": outcome.peak_bytes,
        "compile_s": round(outcome.compile_s, 1),
    }


def check(kind: str, only: str) -> dict[str, Any]:
    """Compile the missing cases with `only` in their names.

    The file is written after each of them, so that a run can be resumed.
    """
    path = RESULTS / f"memory_{kind}.json"
    found = json.loads(path.read_text())["cases"] if path.exists() else {}
    on_tpu = find_target(f"{kind}:{_LAYOUTS[kind][4]}").platform == "tpu"
    for case in _CASES + (_TPU_CASES if on_tpu else _GPU_CASES):
        name, settings, devices = case_of(case)
        if only not in name and name not in found:
            continue
        target = find_target(f"{kind}:{_LAYOUTS[kind][devices]}")
        if name not in found:
            check_compiler(target)
            try:
                compiled = compiled_bytes(target, settings)
                found[name] = {"settings": " ".join(settings), **compiled, "provenance": origin()}
            except CompileError as error:
                print(f"{name}: {error}")
                continue
            write(path, kind, found)
        config = load_config(CONFIG, settings)
        memory = step_memory(config, target.platform)
        allocated = sum(found[name][part] for part in ("argument_bytes", "temporary_bytes", "result_bytes"))
        off = memory.total / allocated - 1
        found[name] |= {"allocated_bytes": allocated, "predicted_bytes": memory.total, "error": round(off, 4)}
        found[name]["parts"] = {"moment": memory.moment, **memory.parts}
        papers = {form.__name__: form(config, config.mesh.sizes) for form in (piper_bytes, monta_bytes)}
        found[name] |= {form: int(num_bytes) for form, num_bytes in papers.items()}
        others = "  ".join(f"{form} {100 * (num_bytes / allocated - 1):+4.0f} %" for form, num_bytes in papers.items())
        print(
            f"{name:58} {memory.total / 1e6:8.1f} of {allocated / 1e6:8.1f} MB {100 * off:+5.1f} %   {others}",
            flush=True,
        )
    return write(path, kind, found)


def write(path: Path, kind: str, cases: dict[str, Any]) -> dict[str, Any]:
    """Write and return the results with their summary."""
    errors = [case["error"] for case in cases.values() if "error" in case]
    summary = {}
    if errors:
        summary = {
            "median_absolute_error": round(statistics.median(map(abs, errors)), 4),
            "lowest_error": round(min(errors), 4),
            "highest_error": round(max(errors), 4),
        }
    result = {"kind": kind, **summary, "cases": cases, "provenance": origin()}
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw predicted against allocated bytes."""
    figure, axes = plt.subplots(figsize=(5, 4.6), layout="constrained")
    cases = [case for case in result["cases"].values() if "error" in case]
    allocated, predicted = ([case[f"{name}_bytes"] / 1e9 for case in cases] for name in ("allocated", "predicted"))
    ends = [0.9 * min(allocated + predicted), 1.1 * max(allocated + predicted)]
    axes.plot(ends, ends, color="0.6", linewidth=1)
    axes.fill_between(ends, [0.95 * end for end in ends], [1.05 * end for end in ends], color="0.9", linewidth=0)
    axes.scatter(allocated, predicted, s=18)
    axes.set(
        xscale="log", yscale="log", xlabel="GB allocated by the compiler", ylabel="GB predicted", xlim=ends, ylim=ends
    )
    median = 100 * result["median_absolute_error"]
    axes.set_title(f"{result['kind']}, bytes of a device: median error {median:.1f} % (grey: 5 %)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Read the command line, compile missing cases, compare."""
    parser = CommandParser(prog="python profiling/memory_check.py", description=__doc__)
    parser.add_argument("kinds", metavar="KIND", nargs="+", choices=_LAYOUTS)
    parser.add_argument("--only", metavar="TEXT", default="", help="compile only cases with this in their name")
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        result = check(kind, arguments.only)
        draw(result, RESULTS / f"memory_{kind}.png")
        print({name: result[name] for name in ("median_absolute_error", "lowest_error", "highest_error")})


if __name__ == "__main__":
    run_command(main)
