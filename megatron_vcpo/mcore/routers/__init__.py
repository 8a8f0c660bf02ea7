"""Routers of experts: replay of the engine's routes, its statistics, and router state that must not change."""
