"""What went wrong in a run, as its records have it."""

from collections.abc import Iterator
from pathlib import Path

from moe_jax.report.html import table
from moe_jax.report.numbers import Records
from moe_jax.telemetry.run_log import read_metrics

_LISTED = 100  # of each page, the last ones
_TOLD = 5


def alarms_of(records: Records) -> Iterator[tuple[str, str]]:
    """Step and text of each alarm, of each end of one, and of each return to an earlier checkpoint."""
    for record in records:
        for key, words in (("alarm", ""), ("alarm_over", "over: ")):
            if isinstance(text := record.get(key), str):
                yield f"step {record['step']:,}", f"{words}{text}"
        if isinstance(back := record.get("back_from_step"), int):
            yield f"step {record['step']:,}", f"went back to this step from step {back:,}, as training had diverged"


def failed_saves(records: Records) -> int:
    """Of checkpoints, over all starts of a run."""
    return sum("failed_saves" in record for record in records)


def alarm_section(records: Records) -> str:
    """For the page; nothing without alarms."""
    found = list(alarms_of(records))
    if not found:
        return ""
    left_out = f"<p>The last {_LISTED} of {len(found):,}.</p>\n" if len(found) > _LISTED else ""
    failed = failed_saves(records)
    lost = f'<p class="warning">{failed} checkpoints were not saved.</p>\n' if failed else ""
    return lost + left_out + table("facts", found[-_LISTED:])


def alarm_text(run: Path) -> str:
    """For the terminal, a line for each of the last few; nothing without alarms."""
    found = list(alarms_of(read_metrics(run)))
    more = [f"  … and {len(found) - _TOLD} before, see the page"] if len(found) > _TOLD else []
    lines = [f"  {step}: {text}" for step, text in found[-_TOLD:]]
    return "\n".join(["alarms of the run:", *more, *lines]) if found else ""
