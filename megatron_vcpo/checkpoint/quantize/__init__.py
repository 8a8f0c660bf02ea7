"""Checkpoints for 8-bit or 4-bit engines: making them from calibration prompts, and quantizing new weights alike."""
