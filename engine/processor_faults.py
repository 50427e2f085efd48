"""What both places of logits processors share: how a sequence is attached, what a fault may do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from octavo.core.contracts.logits_processor import AttachedRequest
from octavo.core.errors import RequestError
from octavo.core.messages import AdmittedRow

logger = logging.getLogger(__name__)


def attached_request(row: AdmittedRow) -> AttachedRequest:
    """A running sequence as a processor sees it; tokens past `num_prompt` are its output before
    a preemption."""
    return AttachedRequest(
        slot=row.slot,
        handle=row.handle,
        prompt=row.token_ids[: row.num_prompt],
        output=row.token_ids[row.num_prompt :],
        params=row.sampling,
        eos_token_ids=() if row.sampling.ignore_eos else tuple(row.eos_token_ids),
    )


class Failure(NamedTuple):
    """Why requests end. fault: a processor's, not that of the requests."""

    message: str
    fault: bool


class Faults:
    """Calls processors and catches what they raise; each processor's exceptions are logged once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def run(
        self, name: str, call: Callable[..., object], *args: object
    ) -> tuple[object, Failure | None]:
        """`(result, None)`, or `(None, failure)` for the requests that the call was made for."""
        try:
            return call(*args), None
        except RequestError as error:
            return None, Failure(str(error), fault=False)
        except (Exception, SystemExit) as error:
            message = f"logits processor '{name}' failed: {type(error).__name__}: {error}"
            if name not in self._logged:
                self._logged.add(name)
                logger.exception("%s (its requests end with an error; logged once)", message)
            return None, Failure(message, fault=True)
