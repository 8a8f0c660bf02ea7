"""Checkpoints for engines of 8 or 4 bits: made from calibration prompts, and the recipe that new weights follow."""
