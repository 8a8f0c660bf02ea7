"""ModelDescription: everything on which a Hugging Face config.json and Megatron's settings must agree.

`describe_hf` and `describe_megatron` read it from either side; equal descriptions mean the same model.
"""

from megatron_vcpo.models.description.hf import describe_hf
from megatron_vcpo.models.description.megatron import describe_megatron
from megatron_vcpo.models.description.records import ModelDescription, ModelFacts

__all__ = ["ModelDescription", "ModelFacts", "describe_hf", "describe_megatron"]
