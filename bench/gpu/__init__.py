"""`octavo bench gpu`: what a GPU does with Octavo, within a few minutes.

A parent process plans the parts by the time that is left and prints; a child process does them, so
that one that crashes or hangs costs itself only.
"""
