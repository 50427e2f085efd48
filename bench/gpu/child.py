"""The process that measures on the device, and the parent's end of it. A figure is progress: its
path and its value."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from octavo.bench.child import Child, ChildError, Progress, serve
from octavo.bench.gpu.budget import Outcome, PartError
from octavo.bench.gpu.parts import Part
from octavo.core.errors import ConfigError, PluginError, PluginFault

OnFigure = Callable[[Outcome, Sequence[str]], object]


class DeviceChild:
    """Starts a process when it is needed. device: `cuda` or `cpu`. on_figure: called with every
    outcome that got a figure, and the figure's path. module: what the process runs."""

    def __init__(
        self,
        device: str,
        on_figure: OnFigure = lambda outcome, path: None,
        module: str = "octavo.bench.gpu.child",
    ) -> None:
        self._device, self._on_figure, self._module = device, on_figure, module
        self._child: Child | None = None

    def perform(self, part: Part, limit: float, outcome: Outcome) -> None:
        """Do a part. Raises `PartError`: it failed, the process ended, or the time was over."""
        until = time.monotonic() + limit
        if self._child is None:
            self._child = Child(self._module, output=2)  # what it prints is messages

        def take(figure: tuple[list[str], Any]) -> None:
            path, value = figure
            outcome.take(value, path)
            self._on_figure(outcome, path)

        request = {"do": part.kind, "given": part.given, "device": self._device}
        try:
            self._child.ask(request, take, until=until)
        except ChildError as error:
            if error.spoiled:
                self.close()
            raise PartError(str(error)) from None
        except TimeoutError:
            self.close()
            raise PartError(f"cut off after {limit:.0f} s") from None
        except EOFError:
            how = self._child.how_it_ended()
            self.close()
            raise PartError(f"the process ended with {how}") from None
        except KeyboardInterrupt:
            self.close()
            raise

    def close(self) -> None:
        """End the process and its children. More than one call is harmless."""
        if self._child is not None:
            self._child.close()
            self._child = None


def perform(request: dict[str, Any], progress: Progress) -> None:
    """In the process: one part."""
    from octavo.bench.gpu.measure import PARTS

    def tell(value: Any, *path: str) -> None:
        progress((path, value))

    PARTS[request["do"]](request["given"], request["device"], tell)


def spoiled(error: Exception) -> bool:
    """Whether the engine may have left something: not where it could not even be made."""
    if isinstance(error, PluginFault):
        return True
    return not isinstance(error, ConfigError | PluginError)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), perform, spoiled=spoiled)
