"""Does the memory of attention grow linearly with the sequence? python profiling/attention_memory.py TARGET

Compiles attention, forward and backward, of one sequence of 4,096, 16,384 and 65,536 tokens, ahead of time and without
the hardware, with the kernel that a training step would choose: causal, with a window, with sinks, with the widths of
latent attention, with documents, and around a ring of 8 context ranks. Reports the temporary memory of a device, also
that of attention with all pairs of tokens in memory, where the compiler accepts it. Targets as in docs/compiled.md:
v5p:2x2x2, h200:1x1x8. Takes 5 to 15 minutes. Writes results/attention_memory_TARGET.json and .png; exit code 1 if a
kernel's memory grows more than 1.25 times as fast as the sequence.
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib.ticker import NullLocator
from real_compiler import compiled_on, read_command
from results_file import RESULTS, rounded, write_result

from moe_jax.config import AttentionConfig, Config, DataConfig, LatentConfig, MeshConfig, ModelConfig, TrainConfig
from moe_jax.config.attention_kernels import kernel_of
from moe_jax.errors import CommandParser, run_command
from moe_jax.measure.targets import Target, target_devices
from moe_jax.models.attention.kernels import KERNELS
from moe_jax.models.attention.over_context import FORMS
from moe_jax.parallel.mesh import Axis, make_mesh

LENGTHS = (4096, 16384, 65536)
HEADS, KV_HEADS, WIDTH, WINDOW, CONTEXT_RANKS = 16, 4, 128, 1024, 8
_LATENTS = LatentConfig(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
_MIB, _SLACK = 2**20, 1.25


class Case(NamedTuple):
    """A kind of attention."""

    attention: AttentionConfig = AttentionConfig()
    latent: LatentConfig = LatentConfig()
    documents: bool = False
    context: int = 1
    kernel: str | None = None  # None: the one that a step would choose

    def config(self, length: int) -> Config:
        """Return the config of a model with this attention."""
        model = ModelConfig(
            num_attention_heads=HEADS,
            num_key_value_heads=None if self.latent.kv_lora_rank else KV_HEADS,
            head_dim=None if self.latent.kv_lora_rank else WIDTH,
            attention=self.attention,
            latent=self.latent,
        )
        return Config(
            model=model,
            mesh=MeshConfig(data=1, context=self.context),
            data=DataConfig(seq_len=length, mask_documents=self.documents),
            train=TrainConfig(compute_dtype="bfloat16", batch_size=1),
        )


CASES = {
    "causal": Case(),
    "window": Case(attention=AttentionConfig(sliding_window=WINDOW)),
    "sinks": Case(attention=AttentionConfig(sinks=True)),
    "latent widths": Case(latent=_LATENTS),
    "documents": Case(documents=True),
    "8 context ranks": Case(context=CONTEXT_RANKS),
    "all pairs": Case(kernel="xla"),
}


def temporary_mib(case: Case, length: int, target: Target, devices: list[Any]) -> tuple[str, float]:
    """Compile attention and its gradients; return the kernel and the temporary memory of a device."""
    config = case.config(length)
    model, mesh = config.model, make_mesh(config.mesh, devices[: case.context])
    kernel = case.kernel or kernel_of(config, target.platform)
    window, scale, form = model.attention.sliding_window, model.qk_width**-0.5, FORMS["ring"]

    def outputs(arrays: dict[str, jax.Array], document: jax.Array | None) -> jax.Array:
        query, key, value, sink = (arrays.get(name) for name in ("query", "key", "value", "sink"))
        if case.context > 1:
            return form(query, (key, value), (), sink, document, None, window, scale)
        return KERNELS[kernel](query, key, value, window, scale, sink, document)

    def body(arrays: dict[str, jax.Array], cotangent: jax.Array, document: jax.Array | None) -> Any:
        def loss(arrays: dict[str, jax.Array]) -> jax.Array:
            return jnp.sum(outputs(arrays, document) * cotangent, dtype=jnp.float32)

        return jax.grad(loss)(arrays)

    def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(None, Axis.CONTEXT) if len(shape) > 1 else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    arrays = {
        "query": shaped(1, length, HEADS, model.qk_width),
        "key": shaped(1, length, model.kv_heads, model.qk_width),
        "value": shaped(1, length, model.kv_heads, model.v_width),
    } | ({"sink": shaped(HEADS, dtype=jnp.float32)} if model.attention.sinks else {})
    cotangent = shaped(1, length, HEADS, model.v_width)
    document = shaped(1, length, dtype=jnp.int32) if case.documents else None
    inputs = arrays, cotangent, document
    specs = jax.tree.map(lambda each: each.sharding.spec, inputs)
    _, temporaries = compiled_on(mesh, target.platform, body, specs, specs[0], *inputs)
    return "ring" if case.context > 1 else kernel, rounded(temporaries.num_bytes / _MIB)


def study(case: Case, lengths: tuple[int, ...], target: Target, devices: list[Any]) -> dict[str, Any]:
    """Describe one kind of attention. A program that does not fit on the device has no memory."""
    found: dict[str, Any] = {"temporary_mib": {}}
    for length in lengths:
        try:
            found["kernel"], found["temporary_mib"][str(length)] = temporary_mib(case, length, target, devices)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            found["temporary_mib"][str(length)] = None
        print(found, flush=True)
    return found


def draw(result: dict[str, Any], name: str, lengths: tuple[int, ...]) -> None:
    """Draw the memory over the length of the sequence."""
    figure, axes = plt.subplots(figsize=(5.4, 4.2), layout="constrained")
    for label, each in result["cases"].items():
        values = [each["temporary_mib"][str(length)] for length in lengths]
        style = {"color": "0.3", "linestyle": "--"} if label == "all pairs" else {}
        axes.plot(lengths, values, marker="o", markersize=4, label=f"{label} ({each['kernel']})", **style)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel="MiB of temporaries of a device")
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(f"{result['target']}: attention, forward and backward", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / f"{name}.png", dpi=150)
    plt.close(figure)


def grows_linearly(found: dict[str, Any], lengths: tuple[int, ...]) -> bool:
    """Whether the memory grows no faster than the sequence, except for the slack. False if a program does not fit."""
    first, last = (found["temporary_mib"][str(length)] for length in (lengths[0], lengths[-1]))
    return None not in (first, last) and bool(last <= _SLACK * first * lengths[-1] / lengths[0])


def main() -> None:
    """Read the command line, compile all cases, write and draw the result."""
    parser = CommandParser(
        prog="python profiling/attention_memory.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _, target = read_command(parser, ())
    devices = target_devices(target)
    cases = {name: study(case, LENGTHS, target, devices) for name, case in CASES.items()}
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "width": WIDTH, "window": WINDOW}
    result = {"target": target.name, "lengths": LENGTHS, **sizes, "cases": cases}
    name = f"attention_memory_{target.name.replace(':', '_')}"
    write_result(name, result)
    draw(result, name, LENGTHS)
    if not all(grows_linearly(found, LENGTHS) for label, found in cases.items() if label != "all pairs"):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
