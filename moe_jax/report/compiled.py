"""The real training step compiled for a target, whose hardware is not required, and compared with its schedule."""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_jax.config.registry import POLICY_FACTS
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import EXIT_BAD_INPUT, UserError
from moe_jax.measure.hlo import parse
from moe_jax.measure.overlap import Replay, replay
from moe_jax.measure.targets import Target, check_compiler, child_environment
from moe_jax.measure.tasks import Match, action_of, match, name_iterations
from moe_jax.plan.simulate import Timeline, simulate
from moe_jax.schedule.actions import Action, by_reach, two_streams
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.xla_flags import Value


class CompileError(UserError):
    """A step that the compiler refuses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The input of a compilation."""

    target: str
    config: str  # YAML file
    overrides: list[str]
    options: dict[str, Value]  # compiler options, in addition to the project's own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The properties of a compiled step, without its program. Bytes are those of one device."""

    num_devices: int
    mesh: dict[str, int]  # devices along each axis
    schedule: str | None  # None: autodiff and the compiler decide the order
    compile_s: float
    argument_bytes: int
    temporary_bytes: int
    result_bytes: int  # bytes of results that do not reuse an argument's buffer
    peak_bytes: int  # bytes in use at once; less than the sum of the others, which includes gaps between buffers
    versions: dict[str, str]
    passes: dict[str, list[list[int]]] | None = None  # the passes of a pipeline, see `measure.overlap`
    fingerprint: str | None = None  # the same as in a run's provenance.json
    exchanges_inside_nodes: bool = False  # of several nodes of GPUs: sums and gathers have other links
    untimed_product: str | None = None  # the assumed train.grouped_product, if a run would choose it by timing
    profile_steps: int = 0  # of a run on GPUs, which may continue with a program by measured times


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One variant of a step, compiled and replayed."""

    variant: str
    outcome: Outcome
    replay: Replay
    match: Match | None
    predicted: Timeline | None  # the simulated schedule, with the tasks' durations in the program


# overrides of a baseline, and of a policy with a single microbatch
_UNMOVED = [
    "schedule.expert_chunks=1",
    "schedule.weight_grad=inline",
    "schedule.grad_reduce=end",
    "schedule.bucket_cap_mb=null",
]
_UNCUT = ["schedule.microbatches=1", "schedule.backward_microbatches=null"]


def variants_of(policies: str | None, overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return the overrides of each variant: `unified+exchange.algorithm=ring` is a policy and further settings.

    Baselines run without this project's additions: `vanilla` is the plain program, with one microbatch and no compiler
    options, and `expert_pipeline` moves neither weight gradients nor reductions.
    """
    if policies is None:
        return {"step": list(overrides)}
    variants = {}
    for variant in policies.split(","):
        policy, *own = variant.strip().split("+")
        facts = POLICY_FACTS.of(policy)
        baseline = [*(_UNCUT if facts.cuts is None else []), *(_UNMOVED if facts.is_baseline else [])]
        variants[variant.strip()] = [*overrides, f"schedule.policy={policy}", *baseline, *own]
    return variants


def compile_variants(
    target: Target, config: str, variants: Mapping[str, list[str]], options: dict[str, Value], hlo_folder: Path | None
) -> list[Compiled]:
    """Compile each variant in a process of its own, one after another.

    If `hlo_folder` is set, VARIANT.hlo and VARIANT.schedule are written there. Raises TargetError (no such hardware,
    compiler not installed), ConfigError, MeshError or CompileError.
    """
    check_compiler(target)
    for overrides in variants.values():
        load_config(config, overrides)
    if hlo_folder:
        hlo_folder.mkdir(parents=True, exist_ok=True)
    results = []
    for variant, overrides in variants.items():
        print(f"compiling {variant} for {target.name} …", file=sys.stderr, flush=True)
        text, outcome = compile_job(
            target, Job(target=target.name, config=config, overrides=overrides, options=options)
        )
        if hlo_folder:
            (hlo_folder / f"{file_name(variant)}.hlo").write_text(text, encoding="utf-8")
            if outcome.schedule:
                (hlo_folder / f"{file_name(variant)}.schedule").write_text(outcome.schedule, encoding="utf-8")
        results.append(analyse(variant, text, outcome, target))
    return results


def file_name(variant: str) -> str:
    """Return a variant's name for a file, with special characters replaced."""
    return re.sub(r"[^\w.=+-]", "_", variant)


def compile_job(target: Target, job: Job) -> tuple[str, Outcome]:
    """Compile in a new process, and return the scheduled HLO and the outcome. Raises CompileError."""
    with tempfile.TemporaryDirectory() as folder:
        stem = Path(folder) / "step"
        stem.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "moe_jax.report.compile_step", str(stem)]
        run = subprocess.run(command, env=child_environment(target), capture_output=True, text=True, check=False)
        if run.returncode == EXIT_BAD_INPUT:
            raise CompileError(run.stderr.strip().splitlines()[-1].removeprefix("error: "))
        if run.returncode == -9:
            raise CompileError(f"--compile {target.name}: the compiler was killed: give it more memory (32 GB or more)")
        if run.returncode:
            sys.stderr.write(run.stderr)
        run.check_returncode()
        outcome = Outcome(**json.loads(stem.with_suffix(".done.json").read_text(encoding="utf-8")))
        return stem.with_suffix(".hlo").read_text(encoding="utf-8"), outcome


def analyse(variant: str, text: str, outcome: Outcome, target: Target) -> Compiled:
    """Replay a compiled program, and compare it with its schedule if it has one."""
    program = parse(text)
    result = replay(program, target, outcome.num_devices, outcome.passes)
    schedule = Schedule.parse(outcome.schedule) if outcome.schedule else None
    if schedule:
        result = name_iterations(result, schedule)
    seconds = task_seconds(result)
    stream_of = by_reach if outcome.exchanges_inside_nodes else two_streams
    return Compiled(
        variant=variant,
        outcome=outcome,
        replay=result,
        match=match(schedule, program, result) if schedule else None,
        predicted=simulate(schedule, lambda action: seconds.get(action, 0.0), stream_of) if schedule else None,
    )


def task_seconds(result: Replay) -> dict[Action, float]:
    """Return the total time of each task's instructions, in seconds."""
    seconds: dict[Action, float] = defaultdict(float)
    for task in result.compute:
        if action := action_of(task.op_name):
            seconds[action] += task.seconds
    for transfer in result.collectives:
        if action := action_of(transfer.op_name):
            seconds[action] += transfer.seconds
    return dict(seconds)
