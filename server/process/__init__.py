"""Processes of a server: start, supervision, engine and API workers."""
