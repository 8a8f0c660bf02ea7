#!/usr/bin/env bash
# Llama-3-8B on GSM8K with the settings of the VCPO paper (arXiv 2602.17616) for that task: rollouts up to 12 steps old.
#
#     examples/llama/llama3_8b.sh [any further flag; a repeated one wins]
#     examples/llama/llama3_8b.sh --fp16              FP16 in trainer and engine (why: docs/mismatch.md)
#     examples/llama/llama3_8b.sh --vcpo-dry-run      checks every flag, on any machine, and starts nothing
#
# Wants 8 GPUs of 80 GB. The prompt files are those of GSM8K: one JSON object a line, with "question" and "answer".
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
MODEL=checkpoints/Meta-Llama-3-8B   # config.json, *.safetensors and the tokenizer
PROMPTS=data/gsm8k/train.jsonl
EVAL_PROMPTS=data/gsm8k/test.jsonl
RUN=runs/llama3_8b
NNODES=1
GPUS_PER_NODE=8
RENDEZVOUS=localhost:29500          # the same host:port on every machine

COMMON=$ROOT/examples/common.sh
[ -f "$COMMON" ] || { echo "$COMMON is missing: set ROOT in $0 to the megatron_vcpo checkout." >&2; exit 2; }
# shellcheck source=examples/common.sh
. "$COMMON"

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 500000
    --seq-length 4096
    --max-position-embeddings 8192
    --vocab-size 128256
    --vcpo-load-hf "$MODEL"
)

PARALLEL_ARGS=(
    --transformer-impl transformer_engine
    --distributed-backend nccl
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --use-distributed-optimizer
)

PRECISION_ARGS=(
    --bf16
    --attention-backend auto
    --rollout-engine-dtype bfloat16
)

TRAIN_ARGS=(
    --train-iters 400
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --clip-grad 1.0
    --save "$RUN"
    --save-interval 50
)

VCPO_ARGS=(
    --vcpo-correction sequence-tis
    --vcpo-correction-upper 8.0
    --vcpo-ess-scaling sqrt
    --vcpo-ess-reference 1.0
    --vcpo-ess-weights raw
    --vcpo-baseline opob
    --vcpo-baseline-scope group
    --vcpo-energy logit
    --vcpo-reward-normalization group-std
    --vcpo-aggregation seq-mean-token-mean
    --vcpo-kl-coefficient 0.0
    --vcpo-entropy-coefficient 0.0
    --vcpo-tokens-per-micro-batch 4096
    --vcpo-logit-chunk 2048
)

ROLLOUT_ARGS=(
    --rollout-tokenizer "$MODEL"
    --rollout-environment jsonl
    --rollout-environment-config '{"stop": "\nQuestion:", "prompt_template":
        "Question: {question}\nReason step by step, then give the final number after ####.\nAnswer:"}'
    --rollout-stop $'\nQuestion:'
    --rollout-prompts "$PROMPTS"
    --rollout-eval-prompts "$EVAL_PROMPTS"
    --rollout-prompts-per-step 8
    --rollout-responses-per-prompt 8
    --rollout-max-prompt-length 2048
    --rollout-max-response-length 2048
    --rollout-temperature 1.0
    --rollout-top-p 1.0
    --rollout-max-lag 12
    --rollout-engine-tensor-parallel-size 2
    --rollout-engine-kv-cache-bytes $((8 << 30))
    --rollout-engine-max-sequences 256
    --rollout-eval-interval 20
    --rollout-eval-num-prompts 512
    --sync-interval 1
)

choose_precision "$@"
launch \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${PRECISION_ARGS[@]}" "${TRAIN_ARGS[@]}" "${VCPO_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" "$@"
