"""The converters and the verifier, for one process (docs/checkpoints.md).

source                        both kinds of checkpoint under one interface
entries, write                how dist_checkpointing stores each parameter, written one at a time
to_megatron, to_hf, compare   the three tasks; compare_files: of what is beside the weights
flags                         target sizes, and the flags for launch scripts
command                       what the command lines share
"""
