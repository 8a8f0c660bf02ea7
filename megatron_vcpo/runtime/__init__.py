"""What every process of a run needs, whatever it does."""
