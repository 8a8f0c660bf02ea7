"""Rewards in processes of their own. Light to import, because each of them imports this."""
