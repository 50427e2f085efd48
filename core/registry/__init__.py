"""The registry: which implementations are known, which is chosen, and how it is created.

    registry = Registry.discover(load=["./my.py:Policy"])
    selection = registry.select("scheduler_policy", ImplementationConfig(name="fcfs"))
    policy = registry.create(selection, context)

`loader` finds plugins through pluggy and calls their hooks; `objects` makes providers for classes
and objects that a user hands over; `checks` compares implementations with their contract;
`options` validates options; `faults` tells which implementation raised. Built-ins and third
parties take the same way. Only a provider's options model is imported before it is created.
"""

from octavo.core.registry.registry import Registry, Selection
from octavo.core.registry.sources import Failure, Registered, Source

__all__ = ["Failure", "Registered", "Registry", "Selection", "Source"]
