"""Decides what is computed in the next step."""
