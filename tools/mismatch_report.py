#!/usr/bin/env python3
"""Why do trainer and engine disagree? tools/mismatch_report.py BATCH SAMPLER [--policy CHECKPOINT] [--engine]."""

import sys
from pathlib import Path

# Run by its path, a script sees only its own folder, and the package is not installed in the CPU environment.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_vcpo.commands.mismatch_report import main

if __name__ == "__main__":
    sys.exit(main())
