"""Search for the first number of a step that is not finite: the step is computed again, block by block.

Dimensions: B sequences on this device, b of them in one accumulation step (part of the batch), N tokens per sequence
and N1 = N + 1, M blocks with experts, E experts, P devices. W is the number of outputs that are checked: those of the
embedding, of each block, and the logits.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool

from moe_jax.config import Config
from moe_jax.config.layer_layout import Segment, Stages, segments
from moe_jax.config.loss_chunks import tokens_of_chunk
from moe_jax.data.loader import batch_samples
from moe_jax.distributed.processes import is_main_process
from moe_jax.files.atomic import reason, write_atomically
from moe_jax.models.gates.inputs import BatchPart
from moe_jax.models.head import unembed
from moe_jax.models.moe import RouterContext
from moe_jax.models.mtp import mtp_input
from moe_jax.models.transformer import block, embed
from moe_jax.parallel import background
from moe_jax.parallel.pipeline import stage, sum_over_stages
from moe_jax.parallel.ranks import of_all_devices
from moe_jax.parallel.sharding import BATCH_SPEC, REPLICATED
from moe_jax.parallel.trees import Params, Tree
from moe_jax.run.setup import Run
from moe_jax.step import fault_injection as faults
from moe_jax.step.compile import config_at
from moe_jax.step.context import State, StepContext, StepInputs
from moe_jax.step.expert_placement import slots_of
from moe_jax.step.kinds import step_kind
from moe_jax.telemetry.nonfinite_steps import BadStep
from moe_jax.telemetry.run_log import RunLog

FILE_NAME = "bad_step.json"


def write_first_bad(run: Run, state: State, bad: BadStep, log: RunLog) -> dict[str, Any]:
    """Write RUN/bad_step.json about a bad step, and return its content. All processes call it.

    `state` has the parameters with which the step was computed, or those of a step soon after it.
    """
    config, mesh, step = config_at(run.config, bad.step), run.trainer.mesh, bad.step
    run.batches.set_state({"next_index": step - 1})
    batch, done = run.on_mesh(next(run.batches)), np.int32(step - 1)
    jax.block_until_ready(state)  # one program at a time: simulated devices share threads, and could deadlock
    params, slot_ME = state["params"], slots_of(state)
    wrong_WP = jax.device_get(_outputs(config, mesh)(params, batch, done, slot_ME))
    gradients = _wrong_parameters(_gradients(config, mesh)(params, batch, done, slot_ME), config)
    places = ["embedding", *(f"block {k}" for k in range(config.model.num_blocks)), "logits"]
    first = next((w for w, wrong_P in enumerate(wrong_WP) if wrong_P.any()), None)
    rows, sources = batch_samples(run.sources, run.mixture, step - 1), config.data.sources
    found = {
        **{name: value if math.isfinite(value) else str(value) for name, value in bad._asdict().items()},
        "batch": step - 1,
        "samples": [number for _, number in rows],
        **({"sources": [sources[source].label for source, _ in rows]} if sources else {}),
        "first_output": None if first is None else places[first],
        "devices": [] if first is None else np.flatnonzero(wrong_WP[first]).tolist(),
        "first_gradient": next((p for p in (*reversed(places[1:-1]), None) if p in gradients), None),
        "gradients": gradients,
        "parameters": _wrong_parameters(_counted(lambda params: params, mesh)(params), config),
    }
    if is_main_process():
        try:
            write_atomically(run.folder / FILE_NAME, json.dumps(found, indent=1) + "\n")
        except OSError as error:  # the divergence matters more
            log.warn(f"{run.folder / FILE_NAME} cannot be written ({reason(error)})")
    return found


def _outputs(config: Config, mesh: Mesh) -> Any:
    """The program that computes which outputs are not finite on which device: bool [W, P], in the order of blocks."""
    context, count = StepContext.of(config, mesh), config.train.grad_accumulation

    def body(params: Any, token_BN1: jax.Array, step: jax.Array, slot_ME: jax.Array | None) -> jax.Array:
        background.new_program()
        params = faults.inject_faults(context.whole(params), step)

        def of_part(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            number, token_bN1 = part
            return _wrong_outputs(params, inputs.part(token_bN1, number, count), context)

        inputs = StepInputs.of(token_BN1, context, BatchPart(step), slot_ME)
        wrong_W = jax.lax.map(of_part, (jnp.arange(count), inputs.in_parts(count))).any(axis=0)
        return of_all_devices(wrong_W)

    in_specs = (context.stored_specs, BATCH_SPEC, REPLICATED, REPLICATED)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=REPLICATED, check_vma=False))


def _wrong_outputs(params: Params, inputs: StepInputs, context: StepContext) -> Bool[Array, " W"]:
    """Which outputs of one accumulation step are not finite on this device.

    Every pipeline stage computes all blocks, and receives the parameters of one block at a time.
    """
    model, stages, compute, slot_ME = context.config.model, context.stages, context.compute, inputs.slot_ME
    router_inputs, document_bN = inputs.router_inputs(context), inputs.document_BN(context)

    mtp = inputs.mtp(context)

    def input_of(block: Tree, x_bND: jax.Array) -> jax.Array:
        """The input of a block from what is below it, which multi-token prediction changes."""
        if mtp is None or "mtp_input" not in block:
            return x_bND
        next_bND = embed(params["embedding"], mtp.next_Bn, model, compute)
        return mtp_input(block["mtp_input"], x_bND, norm_D=params["norm"], next_BnD=next_bND, model=model)

    def through(number: int, segment: Segment, x_bND: jax.Array, below: int, moe_below: int) -> Any:
        total, *rows = stages.layout[number]
        kinds, own = segment.kinds, total // stages.stages

        def period(x_bND: jax.Array, iteration: jax.Array) -> tuple[jax.Array, jax.Array]:
            blocks = _row(params["segments"][number], jnp.array(rows)[iteration], own)
            wrong = []
            for place, view in enumerate(segment.views):
                own_inputs = router_inputs and router_inputs.above(below + iteration * len(kinds) + place)
                m = moe_below + iteration * kinds.count("moe") + kinds[:place].count("moe")
                slot_E = None if slot_ME is None or kinds[place] != "moe" else slot_ME[m]
                own_context = RouterContext(own_inputs, slot_E=slot_E, speed_P=compute.rank_speeds)
                x_bND = input_of(blocks[place], x_bND)
                x_bND, _, _ = block(blocks[place], x_bND, model, view, compute, own_context, document_bN)
                wrong.append(_is_wrong(x_bND))
            return x_bND, jnp.stack(wrong)

        return jax.lax.scan(period, x_bND, jnp.arange(segment.repeats))

    x_bND = embed(params["embedding"], inputs.local_tokens().input_Bn, model, compute)
    found, below, moe_below = [_is_wrong(x_bND)[None]], 0, 0
    for number, segment in enumerate(segments(model)):
        x_bND, wrong = through(number, segment, x_bND, below, moe_below)
        found.append(wrong.ravel())
        below += wrong.size
        moe_below += segment.kinds.count("moe") * segment.repeats
        if below <= model.num_layers:
            decoded_bND = x_bND
    x_TD = decoded_bND.reshape(-1, model.hidden_size)
    chunk = tokens_of_chunk(len(x_TD), model.vocab_size, compute.loss_chunk)
    wrong_T = jax.lax.map(lambda x_D: _is_wrong(unembed(params, x_D[None, None], model)), x_TD, batch_size=chunk)
    return jnp.concatenate([*found, wrong_T.any()[None]])


def _row(stacked: Any, row: jax.Array, own: int) -> Any:
    """A row of stacked arrays, sent to all pipeline stages; each stage has `own` rows of them."""
    owner, place = jnp.divmod(row, own)

    def of_leaf(leaf: jax.Array) -> jax.Array:
        return sum_over_stages(jnp.where(stage() == owner, leaf[place], 0))

    return jax.tree.map(of_leaf, stacked)


def _is_wrong(x: jax.Array) -> jax.Array:
    return ~jnp.isfinite(x).all()


def _gradients(config: Config, mesh: Mesh) -> Any:
    """The program that counts the numbers that are not finite in each gradient of a step."""
    context, kind = StepContext.of(config, mesh), step_kind(config, mesh)

    def body(params: Any, token_BN1: jax.Array, step: jax.Array, slot_ME: jax.Array | None) -> Any:
        background.new_program()
        return kind.gradients(
            faults.inject_faults(params, step), StepInputs.of(token_BN1, context, BatchPart(step), slot_ME), context
        )[0]

    in_specs = (context.stored_specs, BATCH_SPEC, REPLICATED, REPLICATED)
    on_mesh = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=context.grad_specs, check_vma=False)
    return _counted(on_mesh, mesh)


def _counted(function: Callable[..., Any], mesh: Mesh) -> Any:
    """The program that counts the numbers that are not finite in each array that a function returns.

    The arrays of stacked blocks ("segments") get a count for each row, others one for the whole array.
    """

    def count(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return jnp.sum(~jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim)) if path[0].key == "segments" else None)

    def counted(*inputs: Any) -> Any:
        return jax.tree.map_with_path(count, function(*inputs))

    return jax.jit(counted, out_shardings=NamedSharding(mesh, REPLICATED))


def _wrong_parameters(counts: Any, config: Config) -> dict[str, dict[str, int]]:
    """The parameters with numbers that are not finite and how many, for each block and for those "outside" blocks."""
    stages, found = Stages.of(config), dict[str, dict[str, int]]()
    runs = segments(config.model)
    below = np.cumsum([0, *(len(segment.kinds) * segment.repeats for segment in runs)])
    for path, count in jax.tree.leaves_with_path(jax.device_get(counts)):
        keys: list[Any] = [getattr(part, "key", getattr(part, "idx", None)) for part in path]
        named = [("outside", keys, count)]
        if keys[0] == "segments":
            number, place, *keys = keys[1:]
            blocks = below[number] + place + np.arange(runs[number].repeats) * len(runs[number].kinds)
            _, *rows = stages.layout[number]
            named = [(f"block {k}", keys, count[row]) for k, row in zip(blocks, rows, strict=True)]
        for where, name, wrong in named:
            if wrong:
                found.setdefault(where, {})[".".join(map(str, name))] = int(wrong)
    return found
