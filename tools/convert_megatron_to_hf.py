#!/usr/bin/env python3
"""Megatron's torch_dist checkpoint -> Hugging Face: tools/convert_megatron_to_hf.py SOURCE TARGET [--help]."""

import sys
from pathlib import Path

# Run by its path, a script sees only its own folder, and the package is not installed in the CPU environment.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_vcpo.commands.convert_megatron_to_hf import main

if __name__ == "__main__":
    sys.exit(main())
