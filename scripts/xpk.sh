#!/usr/bin/env bash
# Trains on TPUs of a GKE cluster through XPK, which makes a JobSet and waits in the cluster's queue.
#   scripts/xpk.sh [--dry-run] CLUSTER TPU_TYPE IMAGE --config FILE log.dir=gs://BUCKET/RUN [section.key=value …]
# TPU_TYPE is as v6e-16; SLICES=2 takes two of them. IMAGE is made with the Dockerfile (EXTRAS=tpu,plots), and FILE is in
# it or in a bucket. After a failure all pods start again, up to 10 times (RESTARTS), and resume from the bucket: there is
# no launcher. --dry-run, as the first argument, prints the command without running it.
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
if [[ $# -lt 4 ]]; then
    echo "error: name a cluster, a type of TPU, an image and what to train: use scripts/xpk.sh CLUSTER TPU_TYPE IMAGE --config FILE" >&2
    exit 2
fi
# --distributed=on: a pod that does not find the others fails, instead of training alone
"$run" xpk workload create --cluster "$1" --tpu-type "$2" --docker-image "$3" --num-slices "${SLICES:-1}" \
    --workload "${WORKLOAD:-moe-jax}" --max-restarts "${RESTARTS:-10}" \
    --command "cd /moe_jax && python -m moe_jax.train --distributed=on$(printf ' %q' "${@:4}")"
