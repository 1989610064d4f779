"""The training loop: a run from its config to its last checkpoint, top to bottom."""

import dataclasses
import gc
import math
from collections.abc import Callable
from contextlib import ExitStack

import jax
from jax.profiler import StepTraceAnnotation

from moe_jax.checkpoint.compatibility import changed_settings
from moe_jax.checkpoint.save import Checkpoints, check_room
from moe_jax.config import Config
from moe_jax.data.loader import check_next_batch
from moe_jax.distributed.failures import exit_with_peers
from moe_jax.distributed.heartbeat import end_progress, report_progress
from moe_jax.distributed.interrupt import StopRequest, stop_on_signals
from moe_jax.distributed.processes import is_main_process
from moe_jax.measure.peak import matrix_flops_per_s
from moe_jax.paths import shown
from moe_jax.run.capacity_schedule import CapacityPrograms
from moe_jax.run.describe import describe, table
from moe_jax.run.divergence import RollBack, handle_divergence
from moe_jax.run.measured_profile import ProfileGuided
from moe_jax.run.memory_check import check_memory
from moe_jax.run.process_agreement import check_same_settings
from moe_jax.run.profiler import Tracing, steps_to_trace
from moe_jax.run.rebalance import Rebalancer
from moe_jax.run.replicator import Replicator
from moe_jax.run.restore import restore_latest
from moe_jax.run.run_dir import check_is_shared, lock_run_dir
from moe_jax.run.setup import Programs, Run, compile_programs, first_state, open_run, record_facts, write_start
from moe_jax.run.step_hooks import StepCallbacks
from moe_jax.run.tuning import Tuning
from moe_jax.step import fault_injection as faults
from moe_jax.step.compile_cache import cached_number
from moe_jax.step.context import State
from moe_jax.telemetry.energy import energy_counter
from moe_jax.telemetry.goodput import Goodput, now
from moe_jax.telemetry.meter import Meter
from moe_jax.telemetry.run_log import RunLog


def train(config: Config) -> State:
    """Train according to the config; resumes from the newest checkpoint in `log.dir`. Returns the last state.

    Writes config.yaml, provenance.json, metrics.jsonl, tensorboard/, checkpoints/ and trace/ into `log.dir`. SIGINT or
    SIGTERM ends the run early, after a checkpoint.

    Raises UserError, before anything is written, for settings, devices, data or checkpoints that do not fit each other;
    CheckpointError if the last state could not be saved; DivergedError after `train.bad_in_a_row` steps in a row whose
    loss or gradient is not finite, if rolling back to the newest checkpoint has not helped, or for a validation loss
    that is not finite, before its state is saved.
    """
    check_same_settings(config)  # the command has checked this already; users' own programs call only this function
    failed_at = 0
    with lock_run_dir(config) as check_lock, stop_on_signals() as stop:
        while True:
            try:
                return _train(config, stop, check_lock, failed_at)
            except RollBack as rolled_back:
                failed_at = rolled_back.step
                config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume=True))


def _train(config: Config, stop: StopRequest, check_lock: Callable[[], None], failed_at: int) -> State:
    """Train from the newest state. `failed_at`: the step because of which the run has rolled back, or 0.

    Raises RollBack, and the errors of `train`.
    """
    begun = now()
    run = open_run(config)
    goodput = Goodput(config.log.goodput_job if is_main_process() else None, begun)
    report_progress(run.first_step)
    check_memory(run)
    if not run.first_step:  # a run that has trained reports it when it saves, and continues
        check_room("log.dir", run.folder, run.trainer.state_shapes)
    run, restored = restore_latest(config, run)
    if restored:
        run.batches.set_state(restored.record.data)
    check_next_batch(run.batches)
    _print(table(describe(run)))
    # only process 0 needs it; processes that measure it at the same time would disturb each other
    dtype = config.train.compute_dtype
    peak = cached_number(f"rate-{dtype}", lambda: matrix_flops_per_s(dtype)) if is_main_process() else math.inf
    replicator = Replicator(run, restored)
    last, step = config.train.steps, run.first_step
    with replicator.released_if_refused():
        programs = compile_programs(run)
        state = restored.state if restored else first_state(run, programs)
        program = programs.step.result()  # nothing is written if the step does not compile
        if step < last or not (run.folder / "config.yaml").exists():  # a run that trains no step keeps its config
            write_start(run, programs.fingerprint)
        if step < last:
            check_is_shared(run.folder, run.identity.run)
    with (
        replicator.released_if_refused(),
        _open_log(run) as log,
        goodput.until_end(log.warn),
        replicator.running(log, programs.digests),
        Tracing(steps_to_trace(config, step), run.folder, log) as tracing,
        _open_checkpoints(run, programs, log) as checkpoints,
        exit_with_peers(),
        ExitStack() as stack,
    ):
        if restored:
            _print(_resuming(step, restored.source) if step < last else _ALREADY.format(run.folder, step))
            if step < last and (changed := changed_settings(run.config, restored.record.config)):
                _print(f"changed since: {changed}")
        if failed_at:
            log.write({"step": step, "back_from_step": failed_at})
        meter = Meter(config, log, peak, energy_counter(jax.local_devices()), metrics_at=run.source_metrics)
        search_state = restored.record.tuner if restored else None
        tuning, rebalancer = Tuning(run, program, meter, log, search_state), Rebalancer(run, meter, log)
        guided = stack.enter_context(ProfileGuided(run, programs.to_measure, program, meter, log, tracing.steps))
        capacities = CapacityPrograms(run.changes, run.batch_shape, log, run.target)
        bad_steps = meter.bad_steps
        bad_steps.restore_losses(restored.record.recent_losses if restored else ())
        callbacks = StepCallbacks(run, programs, meter, tuning, checkpoints, replicator, log)
        callbacks.replicate(step, state)
        if restored and restored.run_id:  # from safety copies, which are made before validation and checkpoint
            callbacks.validate_and_save(step, state, restored.is_validated)
        while step < last and not stop.reached() and not bad_steps.too_many:
            check_lock()
            state = faults.inject_requested_fault(state)
            bound = bad_steps.loss_bound(run.trainer.mesh, done=step)
            inputs = run.on_mesh(next(run.batches)), *run.routing.inputs(step + 1, bound)
            step += 1
            if capacities.begins(step):
                with meter.paused():
                    program, callbacks.evaluate = capacities.programs()
            program = guided.program_of(step) or program
            tracing.begin(step, meter)
            goodput.step(step)
            with StepTraceAnnotation("train", step_num=step):
                state, metrics = program(state, *inputs)
            metrics = run.routing.take(step, metrics)
            meter.add(step, metrics, timed=step not in tracing.steps and not guided.is_tracing)
            if step == run.first_step + 2:  # the first step is recorded by now
                programs.compile_others()
                if not gc.isenabled():  # the command disables garbage collection at startup
                    gc.freeze()
                    gc.enable()
            tracing.end(step, program, meter)
            report_progress(step - 1)
            program = tuning.after_step(step) or program
            state = rebalancer.after_step(step, state)
            callbacks.replicate(step, state)
            callbacks.validate_and_save(step, state)
        meter.finish(stopping=True)
        if bad_steps.too_many:
            raise handle_divergence(run, state, bad_steps, checkpoints, failed_at, log)
        if step > run.first_step:
            tuning.finish()
            guided.finish()
        if 0 < step < last:
            callbacks.save(step, state)
    end_progress()
    if step < last:
        _print(f"stopped after step {step}: the same command resumes from there")
    return state


def _resuming(step: int, source: str) -> str:
    return f"resuming from step {step}: {source}" if source else f"resuming from step {step}"


_ALREADY = "log.dir={} is already trained to step {}: set train.steps higher to continue"


def _print(text: str) -> None:
    if is_main_process():
        print(shown(text), flush=True)


def _open_log(run: Run) -> RunLog:
    return RunLog(
        run.folder,
        start_step=run.first_step,
        total_steps=run.config.train.steps,
        tokens_per_step=run.config.train.batch_size * run.config.data.seq_len,
        tensorboard=run.config.log.tensorboard,
        quiet=not is_main_process(),
        wandb_project=run.config.log.wandb_project,
        config=dataclasses.asdict(run.config),
    )


def _open_checkpoints(run: Run, programs: Programs, log: RunLog) -> Checkpoints:
    digests, keep = programs.digests, run.config.checkpoint.keep
    return Checkpoints(run.folder, keep, log, lambda state: digests.result()(state), record_facts(run))
