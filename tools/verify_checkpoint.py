#!/usr/bin/env python3
"""Are two checkpoints the same model? tools/verify_checkpoint.py A B, each Hugging Face's or Megatron's."""

import sys
from pathlib import Path

# Run by its path, a script sees only its own folder, and the package is not installed in the CPU environment.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_vcpo.commands.verify_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
