"""octavo.server: see docs/structure.md."""
