"""Keeps a lease alive while its owner works."""

from __future__ import annotations

import threading
from collections.abc import Callable

from semel.errors import LeaseLost, reason_of
from semel.events import EVENTS, Events, LeaseEnded, log
from semel.pipeline.ledger import Lease, Ledger


class Heartbeat:
    """Renews a driver's lease in the background until it is stopped or the lease is lost.

    When *is_active* says that the work has ended, the lease is released instead: nobody
    waits for a process that lives on without its query.
    """

    def __init__(
        self,
        ledger: Ledger,
        lease: Lease,
        events: Events = EVENTS,
        is_active: Callable[[], bool] = lambda: True,
    ) -> None:
        self._ledger = ledger
        self._lease = lease
        self._events = events
        self._is_active = is_active
        self._stop = threading.Event()
        self.lost = False
        self._thread = threading.Thread(
            target=self._run, name=f"semel-lease-{lease.scope}", daemon=True
        )

    def start(self) -> Heartbeat:
        """Begin to renew."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop renewing and wait for a renewal under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._lease.seconds)

    def _run(self) -> None:
        while not self._stop.wait(self._lease.seconds / 3):
            try:
                if not self._is_active():
                    self._ledger.release(self._lease)
                    return
                self._ledger.renew(self._lease)
            except LeaseLost:
                self.lost = True
                self._events.emit(LeaseEnded(str(self._lease.scope), self._lease.epoch, "lost"))
                return
            except Exception as error:  # noqa: BLE001  the decision checks the epoch anyway
                reason = reason_of(error)
                log.warning("lease not renewed", extra={"reason": reason})
