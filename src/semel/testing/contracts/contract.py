"""What every contract has: its rules, and a way to run them without pytest."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from itertools import product
from typing import Any


class Contract:
    """The base of every contract."""

    @classmethod
    def rules(cls) -> list[str]:
        """List the contract's tests by name."""
        return [name for name in dir(cls) if name.startswith("test_")]

    @classmethod
    def violations(cls) -> dict[str, BaseException]:
        """Run the contract without pytest; return the rules that are broken, each with an error.

        For implementations that are broken on purpose.  A rule that is skipped is not broken.
        """
        broken: dict[str, BaseException] = {}
        for rule in cls.rules():
            for arguments in _parameters(getattr(cls, rule)):
                try:
                    cls().follow(rule, **arguments)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except unittest.SkipTest:
                    continue
                except BaseException as error:  # noqa: BLE001  what pytest raises is no Exception
                    broken[rule] = error
        return broken

    def follow(self, rule: str, **arguments: Any) -> None:
        """Run one test, as pytest would."""
        getattr(self, rule)(**arguments)


def _parameters(test: Any) -> Iterator[dict[str, Any]]:
    """Spell out what `pytest.mark.parametrize` says about *test*."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    choices = []
    for mark in marks:
        names, values = mark.args
        if isinstance(names, str):
            choices.append([{names: value} for value in values])
        else:
            choices.append([dict(zip(names, value, strict=True)) for value in values])
    for chosen in product(*choices):
        yield {name: value for choice in chosen for name, value in choice.items()}
