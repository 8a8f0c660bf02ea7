#!/usr/bin/env python3
"""Hugging Face checkpoint -> Megatron's torch_dist format: tools/convert_hf_to_megatron.py SOURCE TARGET [--help]."""

import sys
from pathlib import Path

# Run by its path, a script sees only its own folder, and the package is not installed in the CPU environment.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_vcpo.commands.convert_hf_to_megatron import main

if __name__ == "__main__":
    sys.exit(main())
