"""Requests to measure with: seeded, the same for everybody who gives the same arguments."""
