#!/usr/bin/env python3
"""Draw runs as one PNG: tools/plot_run.py RUN [RUN2 ...] [-o FILE]. Prints the path of the picture."""

import sys
from pathlib import Path

# Run by its path, a script sees only its own folder, and the package is not installed in the CPU environment.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_vcpo.commands.plot_run import main

if __name__ == "__main__":
    sys.exit(main())
