"""Why something is as it is: reports on what a run has saved."""
