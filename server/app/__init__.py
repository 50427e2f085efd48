"""The ASGI application: its routes, how each is answered, the live page."""
