"""What flows from the engine to the loss, and its forms: records, flat arrays, on other ranks, on disk."""
