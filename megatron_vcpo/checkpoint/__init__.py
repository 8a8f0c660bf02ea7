"""Hugging Face checkpoints and Megatron models, over the tables of `sync.naming`.

records.py             what config.json and Megatron's settings have to agree on
describe_hf.py         that, read from config.json
describe_megatron.py   that, read from Megatron's config
description.py         the three above, in one import
flags.py               Megatron's flags for it
hf_config.py           config.json from Megatron, Megatron's flags from config.json, and the comparison
rotary.py              the built model's rotary frequencies
safetensors_folder.py  lazy reading
checksums.py           damage of a distributed checkpoint's files
guard.py               that, where Megatron's training saves and loads
load_hf.py             each rank loads its part
model_files.py         what belongs to a model beside weights and architecture: its end tokens, its tokenizer

The converters and the verifier, for one process (docs/checkpoints.md):

convert_model.py       Megatron's arguments and its GPTModel, with or without memory for the weights
convert_entries.py     how dist_checkpointing stores each parameter, as that model says
convert_read.py        regions of a torch_dist checkpoint
convert_source.py      both kinds of checkpoint under one interface
convert_write.py       torch_dist, one parameter in memory at a time
convert_folder.py      an output folder that is complete or not there, and can be resumed
convert_to_megatron.py, convert_to_hf.py, convert_compare.py   the three tasks
compare_files.py       the third one's, of what is beside the weights
convert_flags.py       target sizes, and the flags for launch scripts
convert_command.py     what the command lines in tools/ share
convert_quiet.py       keeps other packages' remarks out of their output
"""
