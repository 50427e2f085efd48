"""The engine in a process of its own: what travels, who starts and watches it, and its client.

Nothing here imports torch; the engine process does when it builds the engine.
"""
