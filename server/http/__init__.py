"""The HTTP application: bodies, limits, security, errors."""
