"""Draw runs as one PNG: vcpo-plot-run RUN [RUN2 ...] [-o FILE]. Prints the path of the picture."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from megatron_vcpo.observability.metrics import MetricsFileError
from megatron_vcpo.observability.picture import PICTURE_FILE, plot_run, plot_runs
from megatron_vcpo.runtime import logs

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 1 after one sentence on stderr."""
    parser = argparse.ArgumentParser(description="Draw one run, or several over one another, as a PNG.")
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folder that holds metrics.jsonl")
    parser.add_argument("-o", "--output", type=Path, help=f"picture (default: {PICTURE_FILE} in the first RUN)")
    options = parser.parse_args(arguments)
    logs.configure_command("plot_run")
    try:
        for run in options.runs:
            if not run.is_dir():
                raise MetricsFileError(f"{run} is not a folder; name the folder of a run.")
        output = options.output or options.runs[0] / PICTURE_FILE
        if len(options.runs) == 1:
            path = plot_run(options.runs[0], output)
        else:
            path = plot_runs(dict(zip(_labels(options.runs), options.runs)), output)
    except MetricsFileError as error:
        logger.error(str(error))
        return 1
    except OSError as error:
        logger.error(f"the picture could not be written: {error}.")
        return 1
    print(path)
    return 0


def _labels(runs: Sequence[Path]) -> list[str]:
    """The folders' names, or as much of their paths as tells them apart."""
    paths = [run.resolve() for run in runs]
    for parts in range(1, max(len(path.parts) for path in paths)):
        labels = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{path} ({number})" for number, path in enumerate(paths, start=1)]
