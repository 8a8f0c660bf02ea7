"""Reports on what a run has saved."""
