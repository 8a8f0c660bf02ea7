"""Hugging Face and torch_dist checkpoints, over the tables of `models.naming`, and the folders they lie in.

load_hf             each rank loads its part of a Hugging Face checkpoint; safetensors_folder reads lazily
hf_config           config.json from Megatron, Megatron's flags from config.json, and the comparison
model_files         what belongs to a model beside weights and architecture: its end tokens, its tokenizer
torch_dist          regions of a torch_dist checkpoint
checksums, guard    damage of such a checkpoint's files, noticed where Megatron saves and loads
save_folder         what the folders of --load and --save may hold
partial_folder      an output folder that is complete or not there, and can be resumed
convert/            the converters and the verifier
quantize/           checkpoints for quantized engines
"""
