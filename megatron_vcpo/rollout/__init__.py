"""One rollout phase: prompts in their order, responses, rewards."""
