"""octavo.testing: the conformance kit."""
