#!/usr/bin/env bash
# Trains a small Mixture-of-Experts language model on two processes of this machine and checks the result.
# Arguments go to `ep-comm train`: ./scripts/quickstart.sh --steps 40 --plot loss.png
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
ep_setup run

cat <<'TEXT'

ep_comm quickstart
  A small language model is trained on the source files of Python's standard library. Its experts are
  spread over two processes (ranks); every step sends tokens to the experts' ranks and back.
  Watch for:
    loss       it falls
    overflow   more tokens arrived than the receive buffer holds: the step is undone and replayed
               with a larger buffer, so that no token is lost
    verify     at the end the same training runs again in eager mode, whose buffers always fit,
               and the weights of both runs are compared bit for bit
  All options: .venv/bin/ep-comm train --help (or python -m ep_comm train --help)

TEXT
exec "$EP_PYTHON" -m ep_comm train --ranks 2 --verify "$@"
