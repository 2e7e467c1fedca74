#!/usr/bin/env bash
# What could not be checked on a CPU, in one command on a machine with a GPU: minutes, no network.
# Needs an environment with unisono installed; PYTHON names its interpreter. On a machine without a GPU it is a dry run:
# everything starts, the GPU tests are skipped with their reason.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

echo "== doctor"
"$PYTHON" -c "from unisono.cli import main; main()" doctor || echo "doctor found something that fails; going on"
echo "== CUDA against CPU: formats, packing, the variable-length kernel, NCCL where there are two GPUs"
"$PYTHON" -m pytest -q tests/gpu -ra
echo "== a real run of a tiny model in each format this machine takes"
PYTHONPATH=tests "$PYTHON" - "$scratch" <<'PROGRAM'
import sys
from pathlib import Path

from support.runs import make_run
from support.tiny import save_tiny

folder = Path(sys.argv[1])
make_run(folder, save_tiny(folder / "model"), length={"updates": 20})
PROGRAM
formats=$("$PYTHON" -c 'import torch; print("fp32 bf16 fp16" if torch.cuda.is_available() else "fp32")')
for compute in $formats; do
    echo "-- $compute"
    "$PYTHON" -m unisono.train "$scratch/run.yaml" "precision.compute=$compute" "run.output_dir=$scratch/$compute" \
        log.every=10
done
echo "== the planner's bytes against the allocator's peak"
"$PYTHON" -W ignore benchmarks/plan_truth.py --only "full bf16" || echo "the planner is further off than it promises; going on"
echo "== faults on this machine: the standard drill and a rehearsal"
"$PYTHON" -c "from unisono.cli import main; main()" drill "$scratch/run.yaml"
"$PYTHON" -c "from unisono.cli import main; main()" rehearse "$scratch/run.yaml"
