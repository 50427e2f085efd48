"""The `octavo` command."""
