# Finds or makes the Python environment that quickstart.sh and test.sh run in. To be sourced, then:
#
#   ep_setup run|dev      "run": what ep-comm needs. "dev": that and what the tests need.
#
# Afterwards EP_ROOT is the repository and EP_PYTHON the interpreter; the repository is on PYTHONPATH.
# Three ways, the first that fits:
#   1. .venv of an earlier call, if pyproject.toml and constraints.txt have not changed since;
#   2. the interpreter on PATH as it is, if it has torch >= 2.11 and the other modules (GPU containers);
#   3. .venv, made and filled here; where the interpreter has torch >= 2.11 already, that torch is kept.
# PYTHON=/path/to/python chooses the interpreter for 2 and 3. Nothing outside the repository is changed.

EP_ROOT="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
EP_VENV="$EP_ROOT/.venv"
EP_PYTHON=""

ep_say() { printf '[ep_comm] %s\n' "$*"; }

ep_die() {
    printf '[ep_comm] error: %s\n' "$1" >&2
    shift
    local line
    for line in "$@"; do printf '          %s\n' "$line" >&2; done
    exit 1
}

ep_is_python310() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

# ep_lacks PYTHON run|dev: prints the modules that are missing, one a line; nothing if all are there.
# Looks at installed metadata only: importing torch takes seconds.
ep_lacks() {
    "$1" - "$2" <<'PY'
import importlib.util
import re
import sys
from importlib import metadata

def torch_version():
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "0.0"

major, minor = (int(n) for n in re.match(r"(\d+)\.(\d+)", torch_version()).groups())
if (major, minor) < (2, 11):
    print("torch")
needed = ["numpy", "typer", "rich"]
if sys.argv[1] == "dev":
    needed += ["pytest", "pytest_timeout", "hypothesis"]
for name in needed:
    if importlib.util.find_spec(name) is None:
        print(name)
PY
}

# Whatever decides what is installed: a change here, or a moved repository, makes .venv stale.
ep_stamp() {
    { printf '%s\n' "$EP_ROOT"; cat "$EP_ROOT/pyproject.toml" "$EP_ROOT/setup.py" "$EP_ROOT/constraints.txt"; } | cksum
}

# ep_venv_ready run|dev: .venv holds all that was asked for. "dev" includes "run".
ep_venv_ready() {
    local kind stamp
    stamp="$(ep_stamp)"
    for kind in "$1" dev; do
        if [ -f "$EP_VENV/.ep_comm-$kind" ] && [ "$(cat "$EP_VENV/.ep_comm-$kind")" = "$stamp" ]; then
            "$EP_VENV/bin/python" -c '' >/dev/null 2>&1 && return 0
        fi
    done
    return 1
}

# Sets EP_BASE, the interpreter to use as it is or to make .venv with.
ep_find_base() {
    local name found=""
    if [ -n "${PYTHON:-}" ]; then
        EP_BASE="$(command -v -- "$PYTHON")" || ep_die "PYTHON=$PYTHON is not a program."
        # test.sh changes the folder later.
        case "$EP_BASE" in */*) EP_BASE="$(CDPATH='' cd -- "$(dirname -- "$EP_BASE")" && pwd)/$(basename -- "$EP_BASE")" ;; esac
        ep_is_python310 "$EP_BASE" || ep_die "PYTHON=$PYTHON is not a Python of version 3.10 or newer."
        return
    fi
    for name in python3 python python3.13 python3.12 python3.11 python3.10; do
        EP_BASE="$(command -v "$name")" || continue
        ep_is_python310 "$EP_BASE" && return
        found="$found $EP_BASE"
    done
    ep_die "no Python of version 3.10 or newer is on PATH." \
        "Too old or not working:${found:- none found}" \
        "Install one, or name one: PYTHON=/path/to/python3 $0"
}

ep_pip() {
    local log="$EP_VENV/install.log" status=0
    # --no-cache-dir: a cache in the home directory would be outside the repository.
    set -- "$EP_VENV/bin/python" -m pip install --no-cache-dir --disable-pip-version-check --no-input "$@"
    if [ -t 1 ]; then
        "$@" || status=$?
    else
        "$@" >"$log" 2>&1 || { status=$?; tail -n 25 "$log" >&2; }
    fi
    [ "$status" -eq 0 ] || ep_die "pip could not install what is needed; the lines above say why." \
        "Often there is no network or the disk is full. Run the script again to go on from here." \
        "Without a network, use a Python that has torch >= 2.11, numpy, typer and rich (for the tests also" \
        "pytest, pytest-timeout and hypothesis): PYTHON=/path/to/python $0"
}

ep_make_venv() {
    local marker="$EP_VENV/.ep_comm-base"
    if [ -e "$EP_VENV" ]; then
        if "$EP_VENV/bin/python" -m pip --version >/dev/null 2>&1 && ep_is_python310 "$EP_VENV/bin/python" &&
            { [ -z "${PYTHON:-}" ] || [ ! -f "$marker" ] || [ "$(cat "$marker")" = "$EP_BASE" ]; }; then
            return
        fi
        [ -f "$marker" ] || ep_die "$EP_VENV exists, was not made by this script, and has no working Python >= 3.10 with pip." \
            "Move it away or remove it, then run this script again."
        ep_say "making .venv anew: it was unfinished, broken, or of another Python"
        rm -rf -- "$EP_VENV"
    fi
    "$EP_BASE" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
        ep_die "$EP_BASE cannot make virtual environments (its modules venv and ensurepip are missing)." \
            "On Debian and Ubuntu the package python3-venv brings them; or name another: PYTHON=/path/to/python3 $0"
    ep_say "making .venv with $EP_BASE"
    mkdir -- "$EP_VENV"
    # Written first, so that an interrupted run is known as ours the next time.
    printf '%s\n' "$EP_BASE" >"$marker"
    "$EP_BASE" -m venv "$EP_VENV" || ep_die "making the virtual environment $EP_VENV failed."
}

# Lets .venv see the packages of EP_BASE. --system-site-packages would not do where EP_BASE itself
# is in a virtual environment: it shows the packages of the Python below it.
ep_share_base_packages() {
    local target
    target="$("$EP_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    "$EP_BASE" -c 'import os, sys; print(*dict.fromkeys(p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")), sep="\n")' \
        >"$target/ep_comm_base.pth"
}

# torchtitan and what its MoE layers import. Its other dependencies are larger than all the rest together.
ep_add_torchtitan() {
    "$EP_VENV/bin/python" -m pip install --no-cache-dir --disable-pip-version-check --no-input --no-deps \
        torchtitan==0.3.0 tyro docstring_parser typeguard spmd_types >"$EP_VENV/torchtitan.log" 2>&1 ||
        ep_say "torchtitan could not be installed (it needs Python 3.11); its tests will skip"
}

ep_fill_venv() {
    local extra=plot start=$SECONDS
    [ "$1" = dev ] && extra=dev
    case "
$EP_LACKS
" in
    *"
torch
"*)
        # The pinned torch first and alone, so that nothing else can make pip weigh several releases of it.
        ep_say "installing torch into .venv (the first time: a minute to several, by your network)"
        ep_pip -r "$EP_ROOT/constraints.txt"
        ep_say "installing ep_comm and what else it needs"
        ep_pip -c "$EP_ROOT/constraints.txt" -e "$EP_ROOT[$extra]"
        ;;
    *)
        ep_say "keeping the torch of $EP_BASE; installing ep_comm and what else it needs into .venv"
        ep_share_base_packages
        ep_pip -e "$EP_ROOT[$extra]"
        ;;
    esac
    [ "$1" != dev ] || ep_add_torchtitan
    ep_stamp >"$EP_VENV/.ep_comm-$1"
    ep_say "installed in $((SECONDS - start)) s"
}

ep_setup() {
    # One installation at a time, if two scripts are started at once. The lock is on the folder itself.
    exec 9<"$EP_ROOT"
    if command -v flock >/dev/null 2>&1; then flock 9; fi
    if [ -z "${PYTHON:-}" ] && ep_venv_ready "$1"; then
        EP_PYTHON="$EP_VENV/bin/python"
    else
        ep_find_base
        EP_LACKS="$(ep_lacks "$EP_BASE" "$1")" || ep_die "$EP_BASE failed when asked for its packages."
        if [ -z "$EP_LACKS" ]; then
            EP_PYTHON="$EP_BASE"
        else
            ep_make_venv
            ep_venv_ready "$1" || ep_fill_venv "$1"
            EP_PYTHON="$EP_VENV/bin/python"
        fi
    fi
    exec 9<&-
    export PYTHONPATH="$EP_ROOT${PYTHONPATH:+:$PYTHONPATH}"
    ep_say "Python: $EP_PYTHON"
}
