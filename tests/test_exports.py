"""What users can import exists, and whatever is public says what it is."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import semel
import semel.operate
import semel.sinks
from semel.sql import tables

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "semel"
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    dotted = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return dotted.removesuffix(".__init__")


def declares_names(path: Path) -> bool:
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        for node in ast.parse(path.read_text()).body
    )


@pytest.mark.parametrize("module", [module_name(path) for path in MODULES if declares_names(path)])
def test_every_exported_name_exists(module):
    imported = importlib.import_module(module)

    missing = [name for name in imported.__all__ if getattr(imported, name, None) is None]

    assert missing == []
    assert len(set(imported.__all__)) == len(imported.__all__)


@pytest.mark.parametrize("package", [semel, semel.operate, semel.sinks])
def test_every_exported_name_has_a_docstring(package):
    silent = [name for name in package.__all__ if not getattr(package, name).__doc__]

    assert silent == []


def test_a_name_that_does_not_exist_is_an_ordinary_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Exactly'"):
        _ = semel.Exactly


@pytest.mark.parametrize("path", MODULES, ids=[module_name(path) for path in MODULES])
def test_whatever_is_public_has_a_docstring(path):
    assert list(undocumented(path)) == []


def undocumented(path: Path) -> Iterator[str]:
    """Find the module, classes, functions and methods that do not say what they are."""
    tree = ast.parse(path.read_text(), str(path))
    if ast.get_docstring(tree) is None:
        yield "the module itself"
    for node in tree.body:
        yield from _undocumented_in(node, "", frozenset())


def _undocumented_in(node: ast.AST, inside: str, said: frozenset[str]) -> Iterator[str]:
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if not isinstance(node, kinds) or node.name.startswith("_"):
        return
    name = f"{inside}{node.name}"
    # A test's name is a sentence already, and a protocol speaks for those that implement it.
    if (
        ast.get_docstring(node) is None
        and not node.name.startswith("test_")
        and node.name not in said
        and not _is_overload(node)
    ):
        yield f"{name} (line {node.lineno})"
    if isinstance(node, ast.ClassDef):
        said = frozenset() if _is_protocol(node) else said_by_protocols()
        for member in node.body:
            yield from _undocumented_in(member, f"{name}.", said)


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith("Protocol") for base in node.bases)


@cache
def said_by_protocols() -> frozenset[str]:
    """Name the methods that a protocol of the tree documents."""
    trees = [ast.parse(path.read_text(), str(path)) for path in MODULES]
    protocols = [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef) and _is_protocol(node)
    ]
    return frozenset(
        method.name
        for protocol in protocols
        for method in protocol.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(method) is not None
    )


def test_a_method_may_be_silent_only_where_a_protocol_speaks_for_it(tmp_path):
    module = tmp_path / "sinks.py"
    module.write_text(
        '"""Sinks."""\n'
        'class Quiet:\n    """A sink."""\n    def prepare(self): ...\n    def whistle(self): ...\n'
        'class Loud(Protocol):\n    """A rule."""\n    def prepare(self): ...\n'
    )

    assert list(undocumented(module)) == ["Quiet.whistle (line 5)", "Loud.prepare (line 8)"]


def _is_overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)


def test_the_metadata_that_alembic_is_given_has_every_table():
    # In a process of its own: here, somebody else has imported every table.
    script = "from semel.sql.tables import metadata; print(*sorted(metadata.tables))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()

    assert found == sorted(re.findall(r"^ {4}(\w+) {2,}", tables.__doc__ or "", re.MULTILINE))


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert project["version"] == semel.__version__


def test_the_changelog_has_this_version():
    headings = [
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    ]

    assert any(heading.startswith(f"## {semel.__version__}") for heading in headings)


def test_the_command_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "semel", "--version"], capture_output=True, text=True, check=True
    )

    assert done.stdout.startswith("semel ")
