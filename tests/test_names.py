"""One class name has one meaning in the whole tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "semel"

STILL_SHARED: frozenset[str] = frozenset()
"""Names that two modules still use for two things.  Names leave this list; none is added."""


def test_a_public_class_name_is_defined_once():
    modules = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(str(path.relative_to(PACKAGE)))

    shared = {name: where for name, where in modules.items() if len(where) > 1}

    assert {name: where for name, where in shared.items() if name not in STILL_SHARED} == {}
    assert STILL_SHARED - shared.keys() == set(), "remove these names from the list"
