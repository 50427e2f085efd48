"""Conformance suites of the server's kinds. Public as names of `octavo.testing`."""
