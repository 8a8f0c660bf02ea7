"""Why trainer and engine disagree: scores by both, in every type, and their difference in parts (docs/mismatch.md)."""
