"""The alarms in a run's records, for the page and for the terminal."""

from collections.abc import Iterator
from pathlib import Path

from moe_jax.report.html import table
from moe_jax.report.numbers import Records
from moe_jax.telemetry.run_log import read_metrics

_LISTED = 100  # the most alarms on the page; the last ones are shown
_PRINTED = 5  # the most alarms on the terminal


def alarms_of(records: Records) -> Iterator[tuple[str, str]]:
    """Yield the step and the text of each alarm, of each end of an alarm, and of each rollback to a checkpoint."""
    for record in records:
        for key, prefix in (("alarm", ""), ("alarm_over", "over: ")):
            if isinstance(text := record.get(key), str):
                yield f"step {record['step']:,}", f"{prefix}{text}"
        if isinstance(back := record.get("back_from_step"), int):
            yield f"step {record['step']:,}", f"went back to this step from step {back:,}, as training had diverged"


def failed_saves(records: Records) -> int:
    """Return the number of checkpoints that could not be saved, over all starts of a run."""
    return sum("failed_saves" in record for record in records)


def alarm_section(records: Records) -> str:
    """Return the alarms as HTML for the page; "" without alarms."""
    found = list(alarms_of(records))
    if not found:
        return ""
    left_out = f"<p>The last {_LISTED} of {len(found):,}.</p>\n" if len(found) > _LISTED else ""
    failed = failed_saves(records)
    lost = f'<p class="warning">{failed} checkpoints were not saved.</p>\n' if failed else ""
    return lost + left_out + table("facts", found[-_LISTED:])


def alarm_text(run: Path) -> str:
    """Return the last few alarms for the terminal, one line each; "" without alarms."""
    found = list(alarms_of(read_metrics(run)))
    more = [f"  … and {len(found) - _PRINTED} before, see the page"] if len(found) > _PRINTED else []
    lines = [f"  {step}: {text}" for step, text in found[-_PRINTED:]]
    return "\n".join(["alarms of the run:", *more, *lines]) if found else ""
