"""Public names that are imported only when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a package's ``__getattr__``: each of *names* comes from the module it maps to.

    A Spark task that imports one module must neither load the others nor need their
    third-party packages.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(names[name]), name)

    return get
