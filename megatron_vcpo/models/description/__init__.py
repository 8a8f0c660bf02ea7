"""ModelDescription: what has to be the same in a Hugging Face config.json and in Megatron's settings.

`describe_hf` and `describe_megatron` read it from either side; two equal descriptions are one model.
"""

from megatron_vcpo.models.description.hf import describe_hf
from megatron_vcpo.models.description.megatron import describe_megatron
from megatron_vcpo.models.description.records import ModelDescription, ModelFacts

__all__ = ["ModelDescription", "ModelFacts", "describe_hf", "describe_megatron"]
