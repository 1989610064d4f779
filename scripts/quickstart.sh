#!/usr/bin/env bash
# Trains a small Mixture-of-Experts model on Shakespeare, on a CPU, and writes a report of the run.
#   scripts/quickstart.sh [section.key=value …]
# The last line of the output is the path of the report.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" plots

exec python -m moe_jax.train --config configs/shakespeare_cpu.yaml "$@"
