"""The registry: which implementations are known, which is chosen, and how it is created.

    registry = Registry.discover(load=["./my.py:Policy"])
    selection = registry.select("scheduler_policy", ImplementationConfig(name="fcfs"))
    policy = registry.create(selection, context)

`loader` finds plugins through pluggy and calls their hooks; `objects` makes providers for classes
and objects that a user hands over; `selection` decides `auto`; `checks` compares implementations
with their contract; `options` validates options; `faults` tells which implementation raised.
Built-ins and third parties take the same path. Before an implementation is created, only its
options model is imported.
"""

from octavo.core.registry.registry import Registry
from octavo.core.registry.selection import Selection
from octavo.core.registry.sources import Failure, Registered, Source

__all__ = ["Failure", "Registered", "Registry", "Selection", "Source"]
