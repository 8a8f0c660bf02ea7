"""Why trainer and engine disagree: score tokens with both, in every dtype, and split the difference
(docs/mismatch.md)."""
