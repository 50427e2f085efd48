"""`octavo doctor`: what this machine has, what Octavo can do with it, and whether that works."""
