"""The engine: scheduler, step loop, worker, and the engine in a process of its own."""
