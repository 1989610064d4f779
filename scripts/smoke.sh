#!/usr/bin/env bash
# Runs a few tests with the newest Python found and the newest packages that pyproject.toml allows, in .venv-newest.
# scripts/test.sh runs all tests with the environment's Python, for which jax may be older.
#   scripts/smoke.sh [arguments for pytest instead of these tests]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# commands; docs and converted models; code that reads traced jax programs, which differ between versions of jax
TESTS=(tests/test_smoke.py tests/test_docs.py tests/convert/test_golden.py)
TESTS+=(tests/models/test_grouped_hopper.py tests/step/test_min_cut_remat.py tests/plan/test_memory.py tests/plan/test_traffic.py)

find_newest() {
    local candidate pyenv="${HOME-}/.pyenv/versions"
    for candidate in python3.13 "$pyenv"/3.13*/bin/python python3.12 "$pyenv"/3.12*/bin/python; do
        if "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.13 or 3.12 found, so nothing newer than the oldest Python is tested: install one" >&2
    return 1
}

python="$(find_newest)"
if [[ "$(.venv-newest/bin/python --version 2>/dev/null)" != "$("$python" --version)" ]] ||
    ! grep -qsF "$PWD/.venv-newest" .venv-newest/bin/activate; then # incomplete, or moved
    "$python" -m venv --clear .venv-newest
fi
# shellcheck disable=SC1091
source .venv-newest/bin/activate
python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --editable '.[dev]'
python -c 'import importlib.metadata as m, sys; print("Python", sys.version.split()[0], "jax", m.version("jax"))'
unset PYTHONDONTWRITEBYTECODE # every process that a test starts would compile the package again
python -m pytest -n 2 --dist worksteal "${@:-${TESTS[@]}}"
