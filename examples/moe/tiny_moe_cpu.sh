#!/usr/bin/env bash
# A small mixture of experts (Qwen3-MoE: 2 layers, 4 experts, 2 for each token) learns to sort six digits, on a CPU and in
# two processes that hold two experts of each layer: a short supervised warm-up, then VCPO on rollouts up to 3 optimizer
# steps old, whose tokens are trained through the experts that served them in the engine (R3). About five minutes.
#
#     make setup
#     bash examples/moe/tiny_moe_cpu.sh [flags of the second phase]
#
# Flags given at the end win over those below; --seed 2 runs the second phase with another seed. The run goes to the folder
# RUN_DIR, a new one by default; --rollout-run-dir, --load and --rollout-tokenizer are the script's own.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
COMMON=$ROOT/examples/common.sh
[ -f "$COMMON" ] || { echo "$COMMON is missing: set ROOT in $0 to the megatron_vcpo checkout." >&2; exit 2; }
# shellcheck source=examples/common.sh
. "$COMMON"
PYTHON=$ROOT/.venv/bin/python
RUN=${RUN_DIR:-runs/tiny_moe_$(date +%Y%m%d-%H%M%S)}
export PYTHONPATH=$ROOT OMP_NUM_THREADS=1

MODEL_ARGS=(
    --num-layers 2
    --hidden-size 128
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 2
    --kv-channels 32
    --qk-layernorm
    --ffn-hidden-size 256
    --num-experts 4
    --moe-ffn-hidden-size 128
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --seq-length 32
)
TASK_ARGS=(
    --rollout-tokenizer "$RUN/tokenizer"
    --rollout-environment sort_digits
    --rollout-environment-config '{"n_digits": 6, "prompt_template": "{digits}:"}'
    --rollout-max-response-length 8
    --vcpo-tokens-per-micro-batch 4096
)
WARM_UP_ARGS=(
    --train-iters 45
    --lr 2e-3
    --lr-warmup-iters 10
    --lr-decay-style constant
    --rollout-prompts-per-step 256
    --rollout-responses-per-prompt 1
    --save "$RUN/warm_up"
    --save-interval 1000
    --rollout-run-dir "$RUN/warm_up"
)
VCPO_ARGS=(
    --train-iters 160
    --lr 2e-4
    --lr-decay-style constant
    --finetune
    --load "$RUN/warm_up"
    --vcpo-correction sequence-tis
    --vcpo-ess-scaling sqrt
    --vcpo-baseline opob
)
PARALLEL_ARGS=(
    --expert-model-parallel-size 2
)
ROLLOUT_ARGS=(
    --rollout-router-replay rollout
    --rollout-prompts-per-step 32
    --rollout-responses-per-prompt 8
    --rollout-max-lag 3
    --rollout-engine-kv-cache-bytes 67108864
    --rollout-eval-interval 40
    --rollout-eval-num-prompts 256
    --rollout-run-dir "$RUN"
)

LAUNCH=("$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 -m)

new_run_folder "$RUN" "another RUN_DIR"
"$PYTHON" "$ROOT/examples/char_tokenizer.py" "$RUN/tokenizer"
echo "1. Supervised warm-up"
run "$RUN/warm_up.log" "${LAUNCH[@]}" megatron_vcpo.supervised \
    "${MODEL_ARGS[@]}" "${TASK_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${WARM_UP_ARGS[@]}"
echo "2. VCPO on stale rollouts"
run "$RUN/train.log" "${LAUNCH[@]}" megatron_vcpo.train \
    "${MODEL_ARGS[@]}" "${TASK_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${VCPO_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "$@"
echo "3. The picture"
"$PYTHON" "$ROOT/tools/plot_run.py" "$RUN"
