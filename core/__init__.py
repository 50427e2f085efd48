"""Octavo's core: contracts, registry, configuration, step loop, model runner, front ends."""
