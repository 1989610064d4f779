#!/usr/bin/env bash
# All measurements that need a GPU, most valuable first, in calls of at most eight minutes:
#   profiling/gpu_day.sh [OPTIONS OF bench_gpu.py]
# CALLS=1 makes one call, for machines that are only lent for minutes. Each call leaves out what earlier ones measured;
# without `--out FOLDER`, results are in profiling/results. Afterwards: python profiling/gpu_page.py
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

unfinished=75 # exit code of a call that had no time for some parts
for _ in $(seq "${CALLS:-3}"); do
    "${PYTHON:-python3}" profiling/bench_gpu.py --resume --minutes 8 "$@"
    code=$?
    [ "$code" -eq "$unfinished" ] || exit "$code"
done
exit "$unfinished"
