#!/usr/bin/env bash
# All checks: style, types, layers, links of the documentation, tests. Makes its own environment. With arguments, those
# tests alone.
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

# Fails where a link is dead or a page is missing. With --quiet, mkdocs would not count warnings, and --strict not fail.
build_site() {
    local folder told code=0
    folder="$(mktemp -d)"
    told="$(NO_MKDOCS_2_WARNING=1 mkdocs build --strict --config-file .mkdocs.yml --site-dir "$folder" 2>&1)" || code=$?
    rm -rf "$folder"
    ((code == 0)) || echo "$told" >&2
    return "$code"
}

check ruff check --quiet
check ruff format --check --quiet
check mypy --no-error-summary
check lint-imports --no-logo
check build_site
check python -m pytest -n 2 --dist worksteal --budget tests/budget.json

if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
