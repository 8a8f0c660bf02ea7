"""One rollout phase: prompts in a fixed order, responses, rewards."""
