"""Before the start: flags, their checks, the dry run, the lock on a run's folder, and the sentence of a failure."""
