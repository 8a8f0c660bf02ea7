"""How weights reach another process: shared memory, CUDA IPC, and vLLM's own transfer over NCCL."""
