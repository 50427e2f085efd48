"""`octavo plan`: what a model would need and reach on a device, from its config.json alone."""
