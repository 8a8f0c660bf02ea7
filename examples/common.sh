# shellcheck shell=bash
# Functions of the launch scripts, which source this file; it is not run by itself. The script sets ROOT, the checkout.

# run LOG COMMAND...: Megatron's own thousand lines go to LOG; what the plugin says is shown. A command that fails ends
# the script with code 1, after the last lines of LOG.
run() {
    local log=$1
    shift
    if ! "$@" 2>&1 | tee "$log" | grep --line-buffered -E '^ *[0-9]+/[0-9]+ \||^megatron_vcpo:'; then
        echo "The run failed; the end of $log:" >&2
        tail -n 30 "$log" >&2
        exit 1
    fi
}

# new_run_folder FOLDER OTHER: makes FOLDER. One that exists ends the script with code 2 and the advice to choose OTHER.
new_run_folder() {
    if [ -e "$1" ]; then
        echo "$1 is there already; remove it, or choose $2." >&2
        exit 2
    fi
    mkdir -p "$1"
}

# python_or NAME: prints the path of the Python of `make setup`, or NAME where there is none.
python_or() {
    if [ -x "$ROOT/.venv/bin/python" ]; then echo "$ROOT/.venv/bin/python"; else echo "$1"; fi
}

# choose_precision FLAG...: with --fp16 among the flags, replaces the script's PRECISION_ARGS with those for FP16 in both
# trainer and engine; --fp16 itself reaches Megatron with the other flags.
choose_precision() {
    local flag
    for flag in "$@"; do
        if [[ $flag == --fp16 ]]; then
            # shellcheck disable=SC2034 # read by the script
            PRECISION_ARGS=(--attention-backend auto --rollout-engine-dtype float16 --initial-loss-scale 65536)
        fi
    done
}

# launch FLAG...: trains with these flags, under torchrun, on this machine: one of the script's NNODES, which meet at
# RENDEZVOUS, with GPUS_PER_NODE processes each. With --vcpo-dry-run one process checks the flags for all of these.
launch() {
    local flag torchrun=torchrun # the active environment's, or else that of `make setup`
    export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    for flag in "$@"; do
        if [[ $flag == --vcpo-dry-run ]]; then
            # Before the other flags, so that a repeated one wins.
            "$(python_or python)" -m megatron_vcpo.train --vcpo-dry-run-processes $((NNODES * GPUS_PER_NODE)) "$@"
            return
        fi
    done
    if [[ $RENDEZVOUS == localhost:* ]] && (( NNODES > 1 )); then
        echo "RENDEZVOUS in $0 names localhost, which is a different machine on each of the $NNODES:" \
            "write one machine's host:port." >&2
        exit 2
    fi
    if ! command -v torchrun > /dev/null && [ -x "$ROOT/.venv/bin/torchrun" ]; then
        torchrun=$ROOT/.venv/bin/torchrun
    fi
    "$torchrun" --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" \
        -m megatron_vcpo.train "$@"
}
