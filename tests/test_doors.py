"""The five front doors: what users import, and that docs and examples import nothing else."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.lazy import DOORS
from tests.test_architecture import works_bare
from tests.test_docs import PAGES, blocks

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "semel"


def names(door: str) -> list[str]:
    return list(importlib.import_module(door).__all__)


EXPORTED = [(door, name) for door in DOORS for name in names(door)]


@pytest.mark.parametrize(("door", "name"), EXPORTED)
def test_a_name_behind_a_door_exists_and_says_what_it_is(door, name):
    found = getattr(importlib.import_module(door), name)

    if not isinstance(found, types.ModuleType | type) and not callable(found):
        # A constant: its docstring stands below it, where only its module's readers see it.
        return
    assert inspect.getdoc(found)


def test_every_name_behind_a_door_is_in_the_pages():
    words = {word for page in PAGES for word in re.findall(r"\w+", page.read_text())}

    assert [f"{door}.{name}" for door, name in EXPORTED if name not in words] == []


@pytest.mark.parametrize("door", DOORS)
def test_dir_lists_every_name_behind_a_door(door):
    assert set(names(door)) <= set(dir(importlib.import_module(door)))
    assert len(names(door)) == len(set(names(door)))


def test_every_name_is_behind_one_door():
    behind: dict[str, list[str]] = {}
    for door, name in EXPORTED:
        behind.setdefault(name, []).append(door)

    assert {name: doors for name, doors in behind.items() if len(doors) > 1} == {}


SHADOWED = {
    "semel.ledger": "the ledger's SQL; operators import `ledger` from `semel.operate`",
}
"""Modules with the name of something that is behind another door, each with its reason."""


def test_no_module_behind_a_door_has_the_name_of_something_else():
    # Importing `semel.operate.explain` binds `explain` in `semel.operate`, whatever was there;
    # and `from semel.messaging import consumer` would find a module before any hint.
    shadowed = {
        module: f"{behind}.{name}"
        for behind, name in EXPORTED
        for door in DOORS
        if hasattr(importlib.import_module(door), "__path__")
        and importlib.util.find_spec(module := f"{door}.{name}")
        and getattr(importlib.import_module(behind), name) is not importlib.import_module(module)
    }

    assert shadowed.keys() == SHADOWED.keys(), shadowed


@pytest.mark.parametrize("door", DOORS)
def test_type_checkers_see_the_names_that_programs_see(door):
    source = Path(importlib.import_module(door).__file__ or "").read_text()
    for_checkers = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for found in node.body
        if isinstance(found, ast.ImportFrom)
        for alias in found.names
    }

    assert for_checkers == set(names(door))


@pytest.mark.parametrize("door", DOORS)
def test_a_name_that_does_not_exist_is_an_ordinary_attribute_error(door):
    with pytest.raises(AttributeError, match=f"module '{door}' has no attribute 'Exactly'"):
        _ = importlib.import_module(door).Exactly


@pytest.mark.parametrize(
    ("door", "name", "behind"),
    [("semel", "PostgresSink", "semel.sinks"), ("semel.messaging", "Runner", "semel")],
)
def test_a_wrong_door_names_the_right_one(door, name, behind):
    with pytest.raises(ImportError, match=f"cannot import name '{name}'.*behind {behind}$"):
        exec(f"from {door} import {name}")
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'.*behind {behind}$"):
        getattr(importlib.import_module(door), name)
    assert not hasattr(importlib.import_module(door), name)


@pytest.mark.parametrize("door", DOORS)
def test_a_door_can_be_looked_through_with_nothing_installed(door):
    works_bare(
        f"""
import inspect, pydoc, {door}
from {door} import *
assert {{name for name, _ in inspect.getmembers({door})}} >= set({door}.__all__)
assert all(hasattr({door}, name) for name in {door}.__all__)
pydoc.render_doc({door})
"""
    )


@pytest.mark.parametrize("door", DOORS)
def test_opening_a_door_needs_no_third_party_package(door):
    works_bare(f"import {door}; assert dir({door})")


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Find every import of ours: the module, and the name that is taken from it."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases):
                if module.split(".")[0] == "semel":
                    yield from ((module, alias.name) for alias in aliases)
            case ast.Import(names=aliases):
                for alias in aliases:
                    if alias.name.split(".")[0] == "semel":
                        yield alias.name, ""


def past_the_doors(source: str) -> list[str]:
    return [
        f"from {module} import {name}"
        for module, name in imports(source)
        if module not in DOORS or (name and name not in (*names(module), "__version__"))
    ]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_page_imports_through_the_doors(page):
    code = [block.text for block in blocks(page) if block.kind == "python"]

    assert [found for source in code for found in past_the_doors(source)] == []


EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[str(path.relative_to(ROOT)) for path in EXAMPLES])
def test_an_example_imports_through_the_doors(path):
    assert past_the_doors(path.read_text()) == []


NAMED = re.compile(r"`(semel(?:\.\w+)+)[`(]")


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_name_in_a_page_exists(page):
    missing = [name for name in NAMED.findall(page.read_text()) if not exists(name)]

    assert missing == []


def exists(dotted: str) -> bool:
    module, _, name = dotted.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name) or bool(
            importlib.import_module(dotted)
        )
    except ModuleNotFoundError:
        return bool(module) and exists_in_class(module, name)


def exists_in_class(dotted: str, attribute: str) -> bool:
    module, _, name = dotted.rpartition(".")
    try:
        return hasattr(getattr(importlib.import_module(module), name, None), attribute)
    except ModuleNotFoundError:
        return False


OURS = re.compile(r"`((?:tests|bench|examples|docs|src)/[\w/.-]*\w)/?`")


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_path_in_a_page_exists(page):
    named = OURS.findall(page.read_text())

    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_wheel_has_the_package_and_its_types_and_nothing_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]

    assert wheel == {"packages": ["src/semel"]}
    assert (PACKAGE / "py.typed").exists()


def test_the_main_dependencies_are_those_of_the_command_and_the_policy():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=~\[]", line)[0] for line in project["dependencies"]}

    assert needed == {"pydantic", "pyyaml", "rich", "typer"}


# The parts whose files a reader should find by their docstring alone.
PARTS = sorted(
    path.parent
    for path in PACKAGE.rglob("__init__.py")
    if path.parent != PACKAGE
    # One file per command, named like it.
    and path.parent.parent != PACKAGE / "cli"
)


@pytest.mark.parametrize("part", PARTS, ids=[str(part.relative_to(PACKAGE)) for part in PARTS])
def test_a_part_says_what_its_files_are_for(part):
    docstring = ast.get_docstring(ast.parse((part / "__init__.py").read_text())) or ""
    files = {path.stem for path in part.glob("[a-z]*.py")}
    folders = {f"{path.parent.name}/" for path in part.glob("[a-z]*/__init__.py")}
    words = set(re.findall(r"\w+/?", docstring))

    assert sorted((files | folders) - words) == []


TEXT = re.compile(r"^```text\n(.*?)^```$", re.M | re.S)


def test_every_path_in_the_tree_of_contributing_exists():
    (tree, *_) = TEXT.findall((ROOT / "CONTRIBUTING.md").read_text())
    folders: list[str] = []
    missing = []
    for line in tree.splitlines():
        # Two spaces end the paths of a line; what follows says what they are for.
        paths = line.strip().split("  ")[0].split()
        del folders[(len(line) - len(line.lstrip())) // 2 :]
        for path in paths:
            here = ROOT.joinpath(*folders, path)
            exists = here.is_dir() if path.endswith("/") else Path(f"{here}.py").is_file()
            missing += [] if exists else [str(here)]
        folders += [paths[0]] if paths[0].endswith("/") else []

    assert missing == []


def test_the_tree_of_contributing_has_every_part():
    (tree, *_) = TEXT.findall((ROOT / "CONTRIBUTING.md").read_text())
    parts = {
        path.name.removesuffix(".py")
        for path in PACKAGE.iterdir()
        if path.is_dir() or path.suffix == ".py"
    }

    parts |= {path.stem for path in (PACKAGE / "messaging").rglob("[a-z]*.py")}
    parts |= {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}

    drawn = set(re.findall(r"[a-z0-9_]+", tree))
    assert {part for part in parts if not part.startswith("_")} - drawn - {"snapshots"} == set()


def test_the_tree_of_contributing_has_every_folder_of_unit_tests():
    (found,) = re.findall(r"^  unit/ (.*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    folders = {path.parent.name for path in (ROOT / "tests" / "unit").glob("*/test_*.py")}

    assert set(re.findall(r"\w+", found)) == folders


def test_every_module_on_the_ways_of_contributing_exists():
    (_, *ways) = TEXT.findall((ROOT / "CONTRIBUTING.md").read_text())
    modules = [
        name
        for way in ways
        for name in re.findall(r"\b(?:messaging|pipeline|postgres|spark|sql)(?:/\w+)+", way)
    ]

    assert len(modules) > 20
    assert [name for name in modules if not (PACKAGE / f"{name}.py").is_file()] == []


WORDS_THAT_WENT = re.compile(
    r"waiting room|\bbur(?:y|ied|ies|ying)\b|acquit|\blets? go\b|\bput aside\b", re.I
)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_page_has_one_word_for_each_thing(page):
    # waiting table, dead-letter, clear a note, release, quarantine
    assert WORDS_THAT_WENT.findall(page.read_text()) == []
