"""Before the start: flags, their checks, the dry run, the lock on a run's folder, and the sentence of a failure."""

from megatron_vcpo.patches import modelopt_without_vllm

modelopt_without_vllm.apply()
