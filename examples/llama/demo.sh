#!/usr/bin/env bash
# The whole of it on a CPU in a few minutes: a small Llama learns to sort digits, first from answers, then by
# reinforcement on stale rollouts, with real Megatron-Core, real vLLM, the VCPO loss and the ESS-aware scheduler.
#
#   bash examples/llama/demo.sh [SEED [FOLDER [more flags for the reinforcement phase]]]
#
# A repeated flag wins over the one below. FOLDER is where the run goes (runs/demo_seed<SEED> by default); --rollout-run-dir,
# --load and --rollout-tokenizer are the script's own.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
COMMON=$ROOT/examples/common.sh
[ -f "$COMMON" ] || { echo "$COMMON is missing: set ROOT in $0 to the megatron_vcpo checkout." >&2; exit 2; }
# shellcheck source=examples/common.sh
. "$COMMON"
cd "$ROOT"

SEED=${1:-1}
RUN=${2:-runs/demo_seed$SEED}
shift $(( $# > 2 ? 2 : $# ))
PYTHON=$(python_or python3)
# One thread: a model this small gains nothing from two, and loses much when another program wants a core.
export PYTHONPATH=. OMP_NUM_THREADS=1

MODEL_ARGS=(
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256
    --seq-length 32 --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
)
TASK_ARGS=(
    --seed "$SEED" --rollout-tokenizer "$RUN/tokenizer" --rollout-environment sort_digits
    --rollout-environment-config '{"n_digits": 8, "prompt_template": "{digits}:"}'
    --rollout-max-response-length 10 --vcpo-tokens-per-micro-batch 4096
)
WARM_UP_ARGS=(
    --train-iters 70 --lr 2e-3 --lr-warmup-iters 10 --lr-decay-style constant
    --rollout-prompts-per-step 256 --rollout-responses-per-prompt 1
    --save "$RUN/warm_up" --save-interval 70
)
REINFORCEMENT_ARGS=(
    --load "$RUN/warm_up" --finetune --train-iters 144 --lr 1e-4 --lr-decay-style constant
    --rollout-prompts-per-step 32 --rollout-responses-per-prompt 8 --rollout-max-lag 7
    --rollout-engine-kv-cache-bytes 134217728
    --rollout-eval-interval 16 --rollout-eval-num-prompts 256 --rollout-run-dir "$RUN"
)

new_run_folder "$RUN" "another seed or folder: make demo ARGS=\"SEED FOLDER\""
"$PYTHON" examples/char_tokenizer.py "$RUN/tokenizer"
echo "1. Supervised warm-up"
run "$RUN/warm_up.log" "$PYTHON" -W ignore -m megatron_vcpo.supervised \
    "${MODEL_ARGS[@]}" "${TASK_ARGS[@]}" "${WARM_UP_ARGS[@]}"
echo "2. Reinforcement on stale rollouts"
run "$RUN/train.log" "$PYTHON" -W ignore -m megatron_vcpo.train \
    "${MODEL_ARGS[@]}" "${TASK_ARGS[@]}" "${REINFORCEMENT_ARGS[@]}" "$@"
echo "3. The picture"
"$PYTHON" tools/plot_run.py "$RUN"
