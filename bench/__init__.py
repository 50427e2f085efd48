"""octavo.bench: see docs/structure.md."""
