"""Rewards in processes of their own. Light: each of them imports this."""
