#!/usr/bin/env python3
"""Quantize a checkpoint for the rollout engine: tools/quantize_for_rollout.py SOURCE TARGET --format fp8 [--help]."""

import sys
from pathlib import Path

# Run by its path, a script sees only its own folder, and the package is not installed in the CPU environment.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_vcpo.commands.quantize_for_rollout import main

if __name__ == "__main__":
    sys.exit(main())
