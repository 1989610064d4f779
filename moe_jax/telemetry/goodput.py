"""The times of a job in Google Cloud's log, from which ml-goodput-measurement computes goodput. Imports no jax.

Goodput is the share of a job's time in which it makes progress, over all of its restarts. The package finds it from the
log's entries: when the job and its preparation began, when each step began, and when the job ended.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, final

from moe_jax.errors import ConfigError, UserError

_SETTING = "log.goodput_job"


class GoodputError(UserError):
    """The log of goodput cannot begin."""


def check_goodput(job: str | None) -> None:
    """Raise ConfigError if a job is set but the package is not installed."""
    if job is not None and importlib.util.find_spec("ml_goodput_measurement") is None:
        raise ConfigError(
            f"{_SETTING}={job} needs the package ml-goodput-measurement, which is not installed: "
            f"pip install -e '.[goodput]', or {_SETTING}=null"
        )


@final
class Goodput:
    """The entries of one start of a job. A `job` of None has none. Raises GoodputError without credentials.

    The log is `goodput_JOB`, of the project of Google's default credentials. Entries are sent in the background. Times
    are those of the host, which starts a step before the devices have finished the one before.
    """

    def __init__(self, job: str | None, begun: datetime):
        """`begun` is when the job started, in UTC."""
        self._recorder: Any = None
        self._warn: Callable[[str], None] = print
        self._is_prepared = False
        if job is None:
            return
        try:
            from ml_goodput_measurement import goodput

            self._recorder = goodput.GoodputRecorder(job, f"goodput_{job}", logging_enabled=True)
            self._recorder.record_job_start_time(begun)
            self._recorder.record_training_preparation_start_time(begun)
        except Exception as error:
            raise GoodputError(
                f"{_SETTING}={job} cannot begin ({_error_text(error)}): run gcloud auth application-default login, or "
                f"{_SETTING}=null"
            ) from None

    @contextmanager
    def until_end(self, warn: Callable[[str], None]) -> Iterator[None]:
        """Record the end of the job at the end of the context. `warn` reports a failure."""
        self._warn = warn
        try:
            yield
        finally:
            self._record(lambda recorder: recorder.record_job_end_time())

    def step(self, step: int) -> None:
        """Record that a step begins. A failure does not end the run: it is reported once, and nothing more is sent."""
        if not self._is_prepared:
            self._record(lambda recorder: recorder.record_training_preparation_end_time())
            self._is_prepared = True
        self._record(lambda recorder: recorder.record_step_start_time(step))

    def _record(self, record: Callable[[Any], None]) -> None:
        if self._recorder is None:
            return
        try:
            record(self._recorder)
        except Exception as error:
            self._recorder = None
            self._warn(f"the log of goodput takes nothing any more ({_error_text(error)})")


def now() -> datetime:
    """Return the time in UTC."""
    return datetime.now(UTC)


def _error_text(error: Exception) -> str:
    """An error as one line; those of Google's packages have no common base type."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
