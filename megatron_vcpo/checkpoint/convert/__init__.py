"""The converters and the verifier; each runs in a single process (docs/checkpoints.md).

source                        both kinds of checkpoint under one interface
entries, write                how dist_checkpointing stores each parameter, and writing them one at a time
to_megatron, to_hf, compare   the three tasks; compare_files: compare everything besides the weights
flags                         target sizes, and the flags for launch scripts
command                       what the command-line tools share
"""
