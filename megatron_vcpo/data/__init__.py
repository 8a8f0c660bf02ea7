"""What flows from the engine to the loss: records, flat arrays, exchange between ranks, files."""
