"""Hook specifications, the plugin registry, shared types, configuration and errors."""
