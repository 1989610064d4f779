#!/usr/bin/env bash
# Trains on a TPU VM, or on a whole TPU slice; jax finds its workers. From your machine, on all workers at once:
#   scripts/tpu_vm.sh [--dry-run] --on NAME --zone ZONE --config FILE [section.key=value …]
# On a worker (the line above runs this on each), or by hand on every worker:
#   scripts/tpu_vm.sh [--dry-run] --config FILE [section.key=value …]
# --dry-run, as the first argument, prints the command without running it. Each worker needs its own clone of the project
# in ~/moe_jax; with several workers, log.dir must be on a disk that they share.
set -euo pipefail

run=exec
show() {
    printf '%q ' "$@"
    echo
}
if [[ "${1-}" == --dry-run ]]; then
    run=show
    shift
fi

if [[ "${1-}" == --on ]]; then
    if [[ -z "${2-}" || "${3-}" != --zone || -z "${4-}" || $# -lt 5 ]]; then
        echo "error: --on needs the TPU's name, its zone and what to train: use scripts/tpu_vm.sh --on NAME --zone ZONE --config FILE" >&2
        exit 2
    fi
    "$run" gcloud compute tpus tpu-vm ssh "$2" --zone="$4" --worker=all \
        --command="cd moe_jax && scripts/tpu_vm.sh$(printf ' %q' "${@:5}")"
    exit
fi

if [[ "$run" == exec ]]; then
    # shellcheck source-path=SCRIPTDIR source=setup_env.sh
    source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" tpu,plots
fi
"$run" python -m moe_jax.train "$@"
