"""HTTP without the application: bodies, limits, security, errors."""
