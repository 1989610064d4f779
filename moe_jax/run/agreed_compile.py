"""A program that all processes of a run compile in the background, each its own, until every one of them has it."""

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum

from jax.stages import Compiled

from moe_jax.distributed.processes import allgather, is_main_process
from moe_jax.errors import first_line


class State(IntEnum):
    """How far the processes are; a failure on any of them counts once all have ended."""

    COMPILING = 0
    COMPILED = 1
    FAILED = 2


class AgreedCompile:
    """A compilation in the background, by a function that returns the program or raises."""

    def __init__(self, compile_program: Callable[[], Compiled]):
        pool = ThreadPoolExecutor(max_workers=1)
        self._program: Future[Compiled] = pool.submit(compile_program)
        pool.shutdown(wait=False)

    def agreed_state(self) -> State:
        """The state of all processes together. All of them call it, while no step runs."""
        program = self._program
        own = State.COMPILING if not program.done() else State.FAILED if program.exception() else State.COMPILED
        if own is State.FAILED and not is_main_process():  # which reports its own reason
            print(f"a step cannot be compiled, {self.reason}", file=sys.stderr, flush=True)
        states = allgather(own)
        return next(state for state in (State.COMPILING, State.FAILED, State.COMPILED) if state in states)

    def result(self) -> Compiled:
        """The program, once it is compiled."""
        return self._program.result()

    @property
    def reason(self) -> str:
        """The first line of the compiler's error, once a process has failed."""
        error = self._program.exception()
        return first_line(error) if error else "on another process"
