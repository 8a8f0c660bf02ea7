"""The error that sync/ raises."""


class SyncError(RuntimeError):
    """Weights could not be published, or the engine does not compute what the trainer does; the message says which."""
