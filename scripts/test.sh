#!/usr/bin/env bash
# All checks: style, types, layers, tests. Makes its own environment. With arguments, those tests alone.
#   scripts/test.sh [arguments for pytest, e.g. -k mesh]
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" dev

if (($#)); then
    exec python -m pytest "$@"
fi

failed=()
check() {
    "$@" || failed+=("$*")
}

check ruff check --quiet
check ruff format --check --quiet
check mypy --no-error-summary
check lint-imports --no-logo
check python -m pytest -n 2 --dist worksteal --budget tests/budget.json

if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
