"""What was written for vLLM runs here: its keywords and flags, its configuration files, and errors
that say what Octavo lacks.
"""
