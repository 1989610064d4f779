# Sourced by the other scripts: changes to the project's root and activates a virtual environment with their packages.
#   source scripts/setup_env.sh EXTRAS      EXTRAS of pyproject.toml: dev, plots, tpu,plots …
# An active virtual environment is used as it is; otherwise .venv is used, and created if it does not exist.
# Nothing is installed again until pyproject.toml changes. $PYTHON names the Python that creates .venv.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11, 3.12 or 3.13 found: install one, or set PYTHON=/path/to/python3" >&2
    return 1
}

activate_env() {
    local extras="$1" python stamp installed venv="${VIRTUAL_ENV:-.venv}"
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        venv=.venv
        python="$(find_python)" || return
        if ! "$python" -m venv --clear "$venv"; then
            echo "error: $python cannot make .venv (on Debian and Ubuntu: apt-get install python3-venv)" >&2
            return 1
        fi
    fi
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
    stamp="$PWD $(cksum <pyproject.toml)"
    for installed in "$extras" dev; do # dev includes plots
        if [[ "$installed" == "$extras" || "$extras" == plots ]] &&
            [[ "$(cat "$venv/.moe_jax-$installed" 2>/dev/null)" == "$stamp" ]]; then
            return
        fi
    done
    echo "installing this folder with its extras $extras into $venv …" >&2
    python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]" || return
    echo "$stamp" >"$venv/.moe_jax-$extras"
}

activate_env "$1"
