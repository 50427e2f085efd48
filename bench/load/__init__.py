"""Sends requests, to an engine in this process or to a server, and notes when tokens come."""
