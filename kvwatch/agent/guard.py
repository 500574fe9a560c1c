"""The one guard: a fault inside the agent ends here, is counted and said, and the host goes on.

Every way from a host into the agent leads through `Guard.run`; nowhere else is everything caught.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

MOST_TOLD = 20
"""Lines that one guard writes in the life of its process: a fault that never repeats itself fills no log."""

MOST_TEXT = 200


class Guard:
    """Counts the faults of one part of the agent, and says each when it is not the one said last."""

    def __init__(self, logger: str = "kvwatch.agent") -> None:
        self.faults = 0
        self._logger = logger
        self._last: dict[str, str] = {}  # by what was tried; as many as there are places in the code
        self._told = 0

    def run(
        self,
        what: str,
        call: Callable[..., T],
        *arguments: Any,
        otherwise: T,
        mend: Callable[[], object] | None = None,
    ) -> T:
        """`call(*arguments)`; `otherwise` when that raises. `what` continues "kvwatch agent: cannot …".

        `mend` is called after a fault, to leave the host as it was; it is guarded in the same way.
        """
        try:
            return call(*arguments)
        except Exception as error:  # noqa: BLE001 - the one guard: nothing may reach the host
            fault = error
        self.faults += 1
        if call != self._tell:  # what cannot be told is only counted
            self.run("tell", self._tell, what, fault, otherwise=None)
        if mend is not None:
            self.run(f"{what}, nor undo it", mend, otherwise=None)
        return otherwise

    def _tell(self, what: str, fault: Exception) -> None:
        text = f"{type(fault).__name__}: {fault}"[:MOST_TEXT]
        if self._last.get(what) == text or self._told >= MOST_TOLD:
            return
        self._last[what] = text
        self._told += 1
        self.log().warning("kvwatch agent: cannot %s: %s", what, text)

    def log(self) -> Any:
        """The logger of this part; the module is imported when there is something to say."""
        import logging

        return logging.getLogger(self._logger)
