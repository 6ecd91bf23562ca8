"""Asking again while others hold what is asked for: a busy machine is no breach of contract."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from semel.messaging.claims import Locked

Result = TypeVar("Result")


async def patiently(ask: Callable[[], Awaitable[Result]]) -> Result:
    """Repeat a whole transaction until the lock timeout does not end it."""
    while True:
        try:
            return await ask()
        except Locked:
            continue
