"""Hugging Face checkpoints and Megatron models, over the tables of `sync.naming`.

records.py             what config.json and Megatron's settings have to agree on
describe_hf.py         that, read from config.json
describe_megatron.py   that, read from Megatron's config
description.py         the three above, in one import
flags.py               Megatron's flags for it
hf_config.py           config.json from Megatron, Megatron's flags from config.json, and the comparison
rotary.py              the built model's rotary frequencies
safetensors_folder.py  lazy reading
load_hf.py             each rank loads its part
"""
