"""What listens to an engine: once, and for as long as that engine lives.

`sqlalchemy.event.contains` knows engines by their address: a new engine at the
address of a freed one may be taken for one that is listened to already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

Listener = tuple[str, Callable[..., Any]]

_LISTENING: Final[WeakKeyDictionary[Engine, set[Listener]]] = WeakKeyDictionary()


def listen_once(
    engine: AsyncEngine, name: str, listener: Callable[..., Any], **options: Any
) -> bool:
    """Let *listener* hear of *engine*'s event *name*; False where it does already.

    An engine that differs from another in its execution options only is that other one: they
    have their connections in common.
    """
    inside = _whole(engine.sync_engine)
    known = _LISTENING.setdefault(inside, set())
    if (name, listener) in known:
        return False
    event.listen(inside, name, listener, **options)
    known.add((name, listener))
    return True


def _whole(engine: Engine) -> Engine:
    while (proxied := getattr(engine, "_proxied", None)) is not None:
        engine = proxied
    return engine
