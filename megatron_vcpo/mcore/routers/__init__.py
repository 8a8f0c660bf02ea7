"""Routers of experts: replay of the engine's routes, accounting of what was replayed, and state that is kept."""
