#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns short sums by reinforcement on a CPU, on trajectories up to three optimizer steps old.
#
#     examples/llama/smollm2_135m_cpu.sh [any further flag; a repeated one wins]
#
# Sums of two numbers of one or two digits, after one solved example. About 20 minutes and 8 GB of memory on one core.
# RUN_DIR and MODEL_DIR are where the run and the checkpoint (540 MB, made when missing) go. Where other work shares the
# cores, set OMP_NUM_THREADS below their number: threads that wait for one another cost more than they bring.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
COMMON=$ROOT/examples/common.sh
[ -f "$COMMON" ] || { echo "$COMMON is missing: set ROOT in $0 to the megatron_vcpo checkout." >&2; exit 2; }
# shellcheck source=examples/common.sh
. "$COMMON"
cd "$ROOT"

RUN_DIR=${RUN_DIR:-runs/smollm2_135m_cpu}
MODEL_DIR=${MODEL_DIR:-runs/models/smollm2_135m_instruct}
PYTHON=$(python_or python)

if [[ ! -f $MODEL_DIR/config.json ]]; then
    "$PYTHON" examples/llama/prepare_smollm2.py "$MODEL_DIR"
fi

# What megatron_vcpo.checkpoint.hf_config.megatron_flags_for() gives for this checkpoint.
MODEL_ARGS=(
    --num-layers 30
    --hidden-size 576
    --ffn-hidden-size 1536
    --num-attention-heads 9
    --group-query-attention
    --num-query-groups 3
    --kv-channels 64
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --position-embedding-type rope
    --rotary-base 100000
    --max-position-embeddings 8192
    --vocab-size 49152
    --padded-vocab-size 49152
    --vcpo-load-hf "$MODEL_DIR"
)

TRAIN_ARGS=(
    --seq-length 32
    --train-iters 64
    --lr 5e-6
    --lr-decay-style constant
    --weight-decay 0.0
    --adam-beta2 0.99
    --clip-grad 1.0
    --seed 1
)

VCPO_ARGS=(
    --vcpo-correction sequence-tis
    --vcpo-ess-scaling sqrt
    --vcpo-baseline opob
    --vcpo-energy logit
    --vcpo-entropy-coefficient 0.01
    --vcpo-tokens-per-micro-batch 768
)

ROLLOUT_ARGS=(
    --rollout-tokenizer "$MODEL_DIR"
    --rollout-environment reasoning_gym:basic_arithmetic
    --rollout-environment-config '{"operators": ["+"], "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2,
        "allow_parentheses": false, "allow_negation": false,
        "prompt_template": "2 + 3 = 5\n{expression} =", "answer_format": "first-line", "stop": "\n"}'
    --rollout-stop $'\n'
    --rollout-prompts-per-step 8
    --rollout-responses-per-prompt 8
    --rollout-max-response-length 6
    --rollout-max-lag 3
    --rollout-engine-kv-cache-bytes $((1 << 30))
    --rollout-eval-interval 8
    --rollout-eval-num-prompts 128
    --rollout-save-trajectories 16
    --rollout-run-dir "$RUN_DIR"
)

"$PYTHON" -W ignore -m megatron_vcpo.train \
    "${MODEL_ARGS[@]}" "${TRAIN_ARGS[@]}" "${VCPO_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "$@"

if [[ -f $RUN_DIR/metrics.jsonl ]]; then # a dry run writes none
    "$PYTHON" tools/plot_run.py "$RUN_DIR"
fi
