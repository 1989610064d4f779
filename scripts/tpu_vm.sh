#!/usr/bin/env bash
# Trains on a TPU VM, or on a whole TPU slice when every worker runs it; jax finds the workers. From your machine:
#   gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all \
#       --command='cd moe_jax && scripts/tpu_vm.sh --config FILE [section.key=value …]'
# Each worker has its own clone of the project; with several workers, log.dir must be on a disk that they share.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" tpu,plots

exec python -m moe_jax.train "$@"
