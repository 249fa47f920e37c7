#!/usr/bin/env bash
# Runs the tests. Arguments go to pytest, paths as seen from the repository:
#   ./scripts/test.sh -k overflow tests/test_runner.py
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
ep_setup dev

cd -- "$EP_ROOT"
# The tests start several ranks on one machine: one thread each keeps them off each other's cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# All of them: on two workers, because many tests wait for something most of the time.
if [ $# -eq 0 ] && "$EP_PYTHON" -c 'import xdist' 2>/dev/null; then
    set -- -n 2 --dist loadgroup
fi
exec "$EP_PYTHON" -m pytest "$@"
