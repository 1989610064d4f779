"""Setup of a run: everything that it needs before its first step, checked before anything is written."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.stages import Lowered
from numpy.typing import NDArray

from moe_jax.checkpoint.checksums import ReplicasError, agreed_digests, digest_program
from moe_jax.checkpoint.replicas.plan import SafetyPlan, safety_plan
from moe_jax.config import Config
from moe_jax.config.validate import check_batch_split
from moe_jax.config.yaml_io import to_yaml
from moe_jax.data.loader import Batches, train_batches
from moe_jax.data.mixture import Mixture
from moe_jax.data.samples import Samples
from moe_jax.data.sources import Tokens, open_tokens, source_tokenizer
from moe_jax.data.tokens import is_text
from moe_jax.distributed.processes import is_main_process, main_first, read_alike
from moe_jax.errors import ConfigError, unwritable
from moe_jax.files.atomic import write_atomically
from moe_jax.files.local_copy import local_path
from moe_jax.measure.provenance import PROVENANCE, STEP_PROGRAM, provenance, versions
from moe_jax.measure.targets import Target
from moe_jax.parallel.mesh import batch_shards, make_mesh, with_sizes_of
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.plan.clusters import Cluster
from moe_jax.run.capacity_schedule import CapacityChange, capacity_changes
from moe_jax.run.choose_exchange import with_fastest_exchange
from moe_jax.run.choose_grouped_matmul import with_fastest_product
from moe_jax.run.export_tokenizer import save_tokenizer
from moe_jax.run.identity import Identity, identity_of
from moe_jax.run.init_from import check_source, source_params
from moe_jax.run.kept_profile import check_profile_steps, kept_profile, step_key
from moe_jax.run.model_tokenizer import check_tokens
from moe_jax.run.process_agreement import check_same_data
from moe_jax.run.resolve_auto import run_cluster
from moe_jax.run.routing_record import RoutingRecords
from moe_jax.run.run_dir import resume_step
from moe_jax.run.sample import encode_prompt
from moe_jax.run.tuning_space import Choices, choices_of
from moe_jax.run.validation import ValidationSet
from moe_jax.step.compile import StepProgram, batch_shape, config_at, step_program, switch_off_pgle, target_here
from moe_jax.step.compile_cache import BackgroundCompile
from moe_jax.step.context import State
from moe_jax.step.expert_placement import slots_of
from moe_jax.step.moving_average import evaluated
from moe_jax.step.trainer import Trainer, make_trainer
from moe_jax.telemetry.goodput import check_goodput
from moe_jax.telemetry.wandb import check_wandb


@dataclasses.dataclass(frozen=True)
class Run:
    """A checked run: its trainer, its data, and the step from which it starts or resumes."""

    config: Config
    folder: Path
    trainer: Trainer
    sources: tuple[Samples, ...]  # the training text of each source
    mixture: Mixture
    batches: Batches  # int32 [rows of this process, data.seq_len + 1] each
    validation: tuple[ValidationSet, ...]  # of each source
    first_step: int  # number of steps done before; 0 for a new run
    identity: Identity
    choices: Choices | None  # settings that the run may change while it trains
    changes: tuple[CapacityChange, ...] = ()  # later changes of its capacity factor
    cluster: Cluster | None = None  # for the costs of migration; None if experts move whatever it costs, or do not move
    damaged: Mapping[int, str] = dataclasses.field(default_factory=dict)  # steps of damaged checkpoints, with reasons
    safety: SafetyPlan | None = None  # of safety copies; None if there are none
    routing: RoutingRecords = dataclasses.field(kw_only=True)
    target: Target | None = None  # GPUs for which the compiler schedules steps, see step/compile.py

    def source_metrics(self, step: int) -> dict[str, float]:
        """For each source of a mixture, its tokens in all steps up to this one, and its epochs."""
        if not self.config.data.sources:
            return {}
        counts = self.mixture.counts(step)
        metrics: dict[str, float] = {}
        for source, samples, count in zip(self.config.data.sources, self.sources, counts, strict=True):
            metrics |= {
                f"tokens/{source.label}": count * samples.seq_len,
                f"epochs/{source.label}": round(count / len(samples), 4),
            }
        return metrics

    @functools.cached_property
    def batch_shape(self) -> jax.ShapeDtypeStruct:
        """The shape of the global batch, with its sharding."""
        return batch_shape(self.config, self.trainer.mesh)

    def on_mesh(self, rows: NDArray[np.int32]) -> jax.Array:
        """The global batch, as an array on the mesh; `rows` are the part that this process has read."""
        return jax.make_array_from_process_local_data(self.batch_shape.sharding, rows, self.batch_shape.shape)


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a run, compiled in the background."""

    step: BackgroundCompile
    init: BackgroundCompile  # makes the first state, from nothing or from the parameters of `train.init_from`
    evaluate: BackgroundCompile
    digests: BackgroundCompile  # computes the checksums of a state, see checkpoint/checksums.py
    fingerprint: str  # of the step's program, as `report --compile` prints it, unless its profile was measured
    to_measure: StepProgram | None  # the step by estimated times, if its instructions are to be measured

    def compile_others(self) -> None:
        """Start to compile the programs that are needed later.

        They are not compiled from the start, so that the compiler of the first step can use all cores of the host.
        """
        self.digests.begin()
        self.evaluate.begin()


def open_run(config: Config, damaged: Mapping[int, str] | None = None, safe_step: int | None = None) -> Run:
    """Check config, devices, data and earlier checkpoints against each other, and return the run.

    It resumes from safety copies of step `safe_step` if given, else from the newest checkpoint that is not among the
    `damaged` ones and whose files look intact. Raises UserError; writes nothing but the index of a text
    (data/text_index.py).
    """
    damaged = dict(damaged or {})
    switch_off_pgle()
    mesh = make_mesh(config.mesh)
    with_sizes_of(mesh, config)  # checks them
    check_profile_steps(config, mesh)
    check_batch_split(config, batch_shards(mesh))
    check_wandb(config.log.wandb_project)
    check_goodput(config.log.goodput_job)
    folder = local_path(config.log.dir)
    config = with_fastest_product(with_fastest_exchange(config, mesh), mesh, folder=folder)
    if choices := choices_of(config, mesh):
        config = choices.config
    data, batch_size = config.data, config.train.batch_size
    tokens = _open_tokens(config)
    check_same_data(tokens)
    first_step = safe_step or resume_step(config, folder, damaged)
    if first_step == 0:
        check_source(config)
    check_tokens(config, new=first_step == 0)
    if config.log.sample_tokens:
        encode_prompt(config, source_tokenizer(data), config.log.sample_prompt)
    rows = _local_rows(NamedSharding(mesh, BATCH_SPEC), batch_size)
    trainer = make_trainer(config_at(config, max(first_step, 1)), mesh)
    sources = tuple(Samples.of(of_source, "train", data) for of_source in tokens)
    mixture = Mixture.of(data, batch_size, config.train.seed)
    identity = identity_of(folder, first_step, tokens)
    return Run(
        config=config,
        folder=folder,
        trainer=trainer,
        sources=sources,
        mixture=mixture,
        batches=train_batches(
            sources, mixture, rows=rows, prefetch=data.prefetch, marks_sources=data.marked_sources > 0
        ),
        validation=tuple(
            ValidationSet.of(Samples.of(of_source, "validation", data), config, rows) for of_source in tokens
        ),
        first_step=first_step,
        identity=identity,
        choices=choices,
        changes=capacity_changes(config, mesh, first_step),
        cluster=_migration_cluster(config),
        damaged=damaged,
        safety=safety_plan(config, trainer.state_shapes),
        target=target_here(trainer),
        routing=RoutingRecords(config, trainer, first_step, identity.train_checksums),
    )


def _open_tokens(config: Config) -> tuple[Tokens, ...]:
    """Open the tokens of all sources. Process 0 does so first if it may count those of a text file, which the others
    then find counted. Raises DataError.
    """
    data, vocab_size = config.data, config.model.vocab_size
    if not any(is_text(source.path) for source in data.mixture):
        return open_tokens(data, vocab_size)
    return main_first(lambda: open_tokens(data, vocab_size))


def compile_programs(run: Run) -> Programs:
    """Trace the step, and start to compile the programs that the first step needs."""
    trainer, state = run.trainer, run.trainer.state_shapes
    pool = ThreadPoolExecutor(max_workers=2)
    init = BackgroundCompile(pool, functools.partial(lowered_init, run))
    if not run.first_step:  # else the state is restored
        init.begin()
    program = step_program(trainer, run.batch_shape, run.target)
    kept = kept_profile(run.folder, step_key(program)) if run.config.schedule.profile_steps else None
    to_measure = program if run.config.schedule.profile_steps and kept is None else None
    if kept is not None and kept.profile is not None:
        program = program.with_measured(kept.profile)
    fingerprint = program.fingerprint
    step = BackgroundCompile(pool, lambda: program)
    step.begin()
    return Programs(
        step=step,
        init=init,
        evaluate=BackgroundCompile(
            pool, functools.partial(trainer.evaluate.lower, evaluated(state), run.batch_shape, slots_of(state))
        ),
        digests=BackgroundCompile(pool, functools.partial(digest_program(state).lower, state)),
        fingerprint=fingerprint,
        to_measure=to_measure,
    )


def lowered_init(run: Run) -> Lowered:
    """The lowered program that makes the first state of a new run, from nothing or from parameters."""
    trainer = run.trainer
    return trainer.init.lower() if run.config.train.init_from is None else trainer.begin.lower(trainer.param_shapes)


def first_state(run: Run, programs: Programs) -> State:
    """The first state of a new run, made while the step compiles. Raises UserError if parameters cannot be read."""
    config, init = run.config, programs.init.result()
    if jax.default_backend() == "gpu":  # the GPU compiler times kernels, for which it needs device memory
        programs.step.result()
    if config.train.init_from is None:
        return cast(State, init())
    state: State = init(source_params(config, run.trainer.param_shapes))
    if jax.process_count() > 1:
        try:
            agreed_digests(programs.digests.result()(state), 0, state)
        except ReplicasError:
            raise ConfigError(
                f"train.init_from={config.train.init_from} holds other parameters on other processes: "
                "give them copies of one folder"
            ) from None
    return state


def record_facts(run: Run) -> dict[str, Any]:
    """The facts about a run in the record of each checkpoint: config, mesh, versions, identity."""
    facts = {"config": dataclasses.asdict(run.config), "mesh": _sizes(run), "versions": versions()}
    return facts | run.identity._asdict()


def write_start(run: Run, fingerprint: str) -> None:
    """Create the run's folder with its config, provenance and tokenizer. Raises ConfigError if it cannot be written.

    `fingerprint` is that of the step's program.
    """
    if not is_main_process():
        return
    facts = provenance() | {"mesh": _sizes(run), "run": run.identity.run, STEP_PROGRAM: fingerprint}
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(run.folder / "config.yaml", to_yaml(run.config))
        write_atomically(run.folder / PROVENANCE, json.dumps(facts, indent=2) + "\n")
        save_tokenizer(run.config, run.folder)
    except OSError as error:
        raise unwritable("log.dir", run.folder, error) from None


def _sizes(run: Run) -> dict[str, int]:
    """The sizes of the axes of the mesh."""
    return {str(axis): size for axis, size in run.trainer.mesh.shape.items()}


def _migration_cluster(config: Config) -> Cluster | None:
    """The cluster by which the costs of migration are computed, the same in all processes; None if not needed.

    Raises ConfigError or ClusterError.
    """
    settings, name = config.migration, config.plan.cluster
    if not settings.enabled or settings.payback_steps is None:
        return None
    return read_alike(lambda: run_cluster(name), f"plan.cluster={name or 'null'}")


def _local_rows(sharding: NamedSharding, batch_size: int) -> list[range]:
    """The rows of a global batch on this process's devices, as the fewest possible ranges in order."""
    slices = sharding.addressable_devices_indices_map((batch_size, 1)).values()
    ranges: list[range] = []
    for start, stop in sorted({index[0].indices(batch_size)[:2] for index in slices if index is not None}):
        if ranges and ranges[-1].stop == start:
            start = ranges.pop().start
        ranges.append(range(start, stop))
    return ranges
