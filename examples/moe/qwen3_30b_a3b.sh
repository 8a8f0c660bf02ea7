#!/usr/bin/env bash
# Qwen3-30B-A3B (128 experts, 8 for each token) on MATH: rollouts up to 4 optimizer steps old, the engine's experts
# replayed in training.
#
#     examples/moe/qwen3_30b_a3b.sh [any further flag; a repeated one wins]
#     examples/moe/qwen3_30b_a3b.sh --fp16              FP16 in trainer and engine (why: docs/mismatch.md)
#     examples/moe/qwen3_30b_a3b.sh --vcpo-dry-run      checks every flag, on any machine, and starts nothing
#
# Wants 2 machines of 8 GPUs of 80 GB; start it on each. The prompt files hold one JSON object a line, with "problem" and
# "solution" (or "answer").
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
MODEL=checkpoints/Qwen3-30B-A3B     # config.json, *.safetensors and the tokenizer
PROMPTS=data/math/train.jsonl
EVAL_PROMPTS=data/math/test.jsonl
RUN=runs/qwen3_30b_a3b
NNODES=2
GPUS_PER_NODE=8
RENDEZVOUS=localhost:29500          # the same host:port on every machine

COMMON=$ROOT/examples/common.sh
[ -f "$COMMON" ] || { echo "$COMMON is missing: set ROOT in $0 to the megatron_vcpo checkout." >&2; exit 2; }
# shellcheck source=examples/common.sh
. "$COMMON"

MODEL_ARGS=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --num-experts 128
    --moe-router-topk 8
    --moe-ffn-hidden-size 768
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 1000000
    --seq-length 5120
    --max-position-embeddings 40960
    --vocab-size 151936
    --vcpo-load-hf "$MODEL"
)

# Experts are spread over the 8 GPUs of a machine, so that tokens do not leave it; the pipeline goes from one to the other.
PARALLEL_ARGS=(
    --transformer-impl transformer_engine
    --distributed-backend nccl
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer
)

MOE_ARGS=(
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
    --moe-router-dtype fp32
    --rollout-router-replay rollout
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
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
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
    --vcpo-tokens-per-micro-batch 10240
    --vcpo-logit-chunk 2048
)

ROLLOUT_ARGS=(
    --rollout-tokenizer "$MODEL"
    --rollout-environment jsonl
    --rollout-environment-config '{"answer_format": "boxed", "prompt_template":
        "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."}'
    --rollout-prompts "$PROMPTS"
    --rollout-eval-prompts "$EVAL_PROMPTS"
    --rollout-chat-template
    --rollout-prompts-per-step 32
    --rollout-responses-per-prompt 16
    --rollout-max-prompt-length 1024
    --rollout-max-response-length 4096
    --rollout-temperature 1.0
    --rollout-top-p 1.0
    --rollout-max-lag 4
    --rollout-engine-tensor-parallel-size 4
    --rollout-engine-kv-cache-bytes $((8 << 30))
    --rollout-engine-max-sequences 256
    --rollout-eval-interval 20
    --rollout-eval-num-prompts 500
    --sync-interval 1
)

choose_precision "$@"
launch \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PRECISION_ARGS[@]}" "${TRAIN_ARGS[@]}" \
    "${VCPO_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "$@"
