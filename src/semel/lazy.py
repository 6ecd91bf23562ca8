"""Public names that are imported only when they are used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from opcode import opmap
from typing import Any, Final

from semel.errors import MissingExtra

DOORS: Final = ("semel", "semel.sinks", "semel.messaging", "semel.operate", "semel.testing")
"""Every package or module that users import names from."""


def lazily(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a package's ``__getattr__``: each of *names* comes from the module it maps to.

    A name that maps to the module of its own name is that module.  A task imports one
    module of a package; it must not pay for the others, nor need the third-party packages
    that they need.  ``from … import`` of a name whose package is missing raises at once;
    elsewhere the name is a `NotInstalled`, so that ``import *``, ``hasattr`` and ``help`` work.
    """

    def get(name: str) -> Any:
        caller = sys._getframe(1)
        is_from = caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]
        if name not in names:
            hint = "".join(f"; it is behind {door}" for door in DOORS if _offers(door, name))
            if hint and is_from:
                # Python would replace the text of an AttributeError.
                raise ImportError(f"cannot import name {name!r} from {package!r}{hint}")
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        try:
            module = importlib.import_module(names[name])
            return module if names[name] == f"{package}.{name}" else getattr(module, name)
        except (MissingExtra, ModuleNotFoundError) as error:
            if is_from:
                raise
            return NotInstalled(error)

    return get


def _offers(door: str, name: str) -> bool:
    # A door that is being imported may have no `__all__` yet.
    return name in getattr(importlib.import_module(door), "__all__", ())


class NotInstalled:
    """A name whose third-party package is not installed: using it raises the import's error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __repr__(self) -> str:
        return f"<{self._error}>"

    def __call__(self, *_: object, **__: object) -> Any:
        raise self._error

    # Called for a base class, in place of the class's own creation.
    __mro_entries__ = __call__

    def __getattr__(self, name: str) -> Any:
        # Python and its tools ask any object for these names.
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error
