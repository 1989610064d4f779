#!/usr/bin/env bash
# Runs all checks: style, types, import layers, links of the documentation, tests. Creates its own environment. With
# arguments, runs only the tests that they select.
#   scripts/test.sh [arguments for pytest, e.g. -k mesh]
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" dev
unset PYTHONDONTWRITEBYTECODE # every process that a test starts would compile the package again

if (($#)); then
    exec python -m pytest "$@"
fi

failed=()
check() {
    "$@" || failed+=("$*")
}

# Fails if a link is dead or a page is missing. With --quiet, mkdocs does not count warnings, so --strict cannot fail.
build_site() {
    local folder output code=0
    folder="$(mktemp -d)"
    output="$(NO_MKDOCS_2_WARNING=1 mkdocs build --strict --config-file .mkdocs.yml --site-dir "$folder" 2>&1)" || code=$?
    rm -rf "$folder"
    ((code == 0)) || echo "$output" >&2
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
