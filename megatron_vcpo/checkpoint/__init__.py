"""Hugging Face checkpoints and Megatron models, over the tables of `sync.naming`.

description.py         what config.json and Megatron's settings have to agree on
hf_config.py           config.json from Megatron, Megatron's flags from config.json, and the comparison
rotary.py              the built model's rotary frequencies
safetensors_folder.py  lazy reading
load_hf.py             each rank loads its part
"""
