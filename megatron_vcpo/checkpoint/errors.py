"""What checkpoint/ raises."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or that is not of the model at hand; one sentence names what to change."""
