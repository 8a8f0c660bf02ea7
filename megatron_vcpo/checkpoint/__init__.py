"""Hugging Face and torch_dist checkpoints, read by the tables of `models.naming`, and the folders that hold them.

load_hf             each rank loads its part of a Hugging Face checkpoint; safetensors_folder reads lazily
hf_config           config.json from Megatron, Megatron's flags from config.json, and the comparison
model_files         what belongs to a model besides weights and architecture: its end tokens, its tokenizer
torch_dist          regions of a torch_dist checkpoint
checksums, guard    find damage of such a checkpoint's files; guard calls checksums when Megatron saves and loads
save_folder         checks of the folders of --load and --save
partial_folder      an output folder that appears only when it is complete, and can be resumed
convert/            the converters and the verifier
quantize/           checkpoints for quantized engines
"""

from megatron_vcpo.patches import modelopt_without_vllm

modelopt_without_vllm.apply()
