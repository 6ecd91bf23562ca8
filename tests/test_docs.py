"""Every page says what is true: its code runs, its tables are the code's, its links lead somewhere.

    ```python     is run, all blocks of a page in order and in one namespace
    ```console    `$ semel …`, `$ make …`, `$ pip install …` must exist as they are written
    ```dockerfile what it installs and the command that it runs must exist, and so must the
    ```yaml       command of a Kubernetes Deployment, which has time to stop
    ```text       right behind a python block, or a console block with `$ semel …`, is its output

A page that needs services says so in a comment: ``<!-- needs: spark postgres -->``.  Code in a
comment that begins with ``<!-- python`` is run, too: it prepares what the reader has already.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import linecache
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from docs.generate import TABLES, regenerated
from semel.events import Metric
from semel.messaging.send.relay import STOP_SECONDS
from semel.messaging.settings import RunnerSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_PAGES = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
NAMES = {page: str(page.relative_to(ROOT)) for page in [*PAGES, *OTHER_PAGES]}

BLOCK = re.compile(
    r"^```(?P<kind>\w*)\n(?P<body>.*?)^```$|^<!-- python\n(?P<hidden>.*?)^-->$", re.M | re.S
)
NEEDS = re.compile(r"^<!-- needs: ([a-z ]+) -->$", re.M)
KINDS = {"python", "text", "console", "sql", "yaml", "dockerfile"}


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a page."""

    kind: str
    text: str
    line: int
    adjacent: bool
    """Nothing but white space between it and the block before."""


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    end = 0
    for found in BLOCK.finditer(text):
        kind = found["kind"] if found["hidden"] is None else "python"
        body = found["body"] if found["hidden"] is None else found["hidden"]
        line = text.count("\n", 0, found.start()) + 2
        yield Block(kind or "", body, line, not text[end : found.start()].strip())
        end = found.end()


def has(page: Path, kind: str) -> bool:
    return any(block.kind == kind for block in blocks(page))


def needs(page: Path) -> list[str]:
    """List the services that the page's code uses; they are names of pytest's marks, too."""
    found = NEEDS.search(page.read_text())
    return found[1].split() if found else []


WITH_CODE = [
    pytest.param(page, id=NAMES[page], marks=[getattr(pytest.mark, name) for name in needs(page)])
    for page in PAGES
    if has(page, "python")
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to run the page in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def services(request, monkeypatch, folder):
    """Start what the page needs, and say where it is as a user's environment would."""
    needed = needs(request.getfixturevalue("page"))
    if "postgres" in needed:
        monkeypatch.setenv("DATABASE_URL", request.getfixturevalue("postgres_url"))
    if "kafka" in needed:
        monkeypatch.setenv("KAFKA", request.getfixturevalue("kafka_server").bootstrap)
    if "registry" in needed:
        monkeypatch.setenv("SCHEMA_REGISTRY", request.getfixturevalue("schema_registry").url)
    if "seaweedfs" in needed:
        for name, value in request.getfixturevalue("seaweedfs").environment.items():
            monkeypatch.setenv(name, value)
    if "spark" not in needed:
        yield
        return
    spark = request.getfixturevalue("spark")
    before = spark._jvm.java.lang.System.getProperty("user.dir")
    work_in(spark, str(folder))
    yield
    work_in(spark, before)


def work_in(spark: SparkSession, folder: str) -> None:
    """Let Spark resolve relative paths in *folder*, as if it had been started there."""
    spark._jvm.java.lang.System.setProperty("user.dir", folder)
    files = spark._jvm.org.apache.hadoop.fs
    # This one is kept and knows only the folder of its own beginning.
    local = files.FileSystem.get(spark._jsc.hadoopConfiguration())
    local.setWorkingDirectory(files.Path(folder))


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(page, services, monkeypatch):
    # A module like any other: what a page defines can be pickled.
    module = types.ModuleType("docs_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    printed = None

    for block, following in zip_longest(blocks(page), [*blocks(page)][1:]):
        has_output = following is not None and following.kind == "text" and following.adjacent
        if block.kind == "python":
            printed = run(block, page, namespace)
        elif block.kind == "console" and block.text.startswith("$ semel ") and has_output:
            printed = run_command(block.text[2:])
        elif block.kind == "text" and block.adjacent and printed is not None:
            assert_printed(block, page, printed)
        else:
            printed = None


def run(block: Block, page: Path, namespace: dict[str, object]) -> str:
    """Run a block; an error's traceback points to the line of the page."""
    name = f"{page}:python at line {block.line}"
    source = "\n" * (block.line - 1) + block.text
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, name, "exec", dont_inherit=True), namespace)
    return printed.getvalue()


def run_command(command: str) -> str:
    code = "from semel.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *shlex.split(command)[1:]],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def assert_printed(block: Block, page: Path, printed: str) -> None:
    """Compare what was printed with the page, in which ``...`` stands for anything."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(block.text, printed, flags):
        pytest.fail(f"{page}:{block.line}: the page says\n{block.text}\nand the code\n{printed}")


@pytest.mark.parametrize("page", PAGES, ids=[NAMES[page] for page in PAGES])
def test_a_page_has_only_blocks_that_are_checked(page):
    unknown = [block for block in blocks(page) if block.kind not in KINDS]

    assert unknown == []
    assert page.read_text().count("\n```") % 2 == 0, "a block is not closed"


@pytest.mark.parametrize("page", PAGES, ids=[NAMES[page] for page in PAGES])
def test_tables_are_what_the_code_says(page):
    assert page.read_text() == regenerated(page.read_text()), "run `make docs`"


def test_every_table_is_printed_somewhere():
    text = "".join(page.read_text() for page in PAGES)

    assert [name for name in TABLES if f"<!-- table: {name} -->" not in text] == []


LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", NAMES, ids=NAMES.values())
def test_links_within_the_repository_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    broken = []
    for found in LINK.finditer(text):
        target, _, anchor = found["target"].partition("#")
        if "://" in target:
            continue
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(found["target"])

    assert broken == []


def test_what_to_watch_names_every_runbook_and_every_metric_of_consumers():
    text = (ROOT / "docs/operate/index.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    runbooks = {
        f"](runbooks/{page.name})" for page in (ROOT / "docs/operate/runbooks").glob("*.md")
    }
    # A failed attempt that is not the last one is nothing to wake a person for.
    metrics = {f"`{metric}`" for metric in Metric} - {"`consumer.retries.total`"}
    missing = {name for name in runbooks | metrics if not any(name in row for row in rows)}
    assert missing == set()


def test_every_page_can_be_reached_from_the_index():
    index = ROOT / "docs" / "index.md"
    reached, todo = set(), [index]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        targets = (found["target"].partition("#")[0] for found in LINK.finditer(page.read_text()))
        todo += [(page.parent / t).resolve() for t in targets if t and "://" not in t]

    assert [NAMES[page] for page in PAGES if page not in {*reached, ROOT / "README.md"}] == []


FOREIGN = {
    "python", "git", "cd", "mkdir", "mv", "cp", "echo", "spark-submit", "psql", "pg_dump",
    "pg_restore", "kafka-consumer-groups.sh",
}  # fmt: skip

COMMANDS = [
    (NAMES[page], block.line + number, line[2:])
    for page in NAMES
    for block in blocks(page)
    if block.kind == "console"
    for number, line in enumerate(block.text.splitlines())
    if line.startswith("$ ")
]


@pytest.mark.parametrize(
    "command", [c for _, _, c in COMMANDS], ids=[f"{page}:{line}" for page, line, _ in COMMANDS]
)
def test_a_command_exists_as_it_is_written(command):
    words = [
        word for word in shlex.split(command.split(" | ")[0]) if "=" not in word or word[0] == "-"
    ]
    match words:
        case ["make", *targets]:
            assert set(targets) <= set(
                re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
            )
        case ["pip", "install", *packages]:
            for package in packages:
                assert_extras_exist(package)
        case ["semel", *arguments]:
            assert_command_exists(arguments)
        case _:
            assert words[0] in FOREIGN, command


def test_an_image_installs_and_runs_what_exists():
    for page in PAGES:
        for block in blocks(page):
            if block.kind == "dockerfile":
                steps = dict(line.split(" ", 1) for line in block.text.splitlines())
                pip, install, *packages = shlex.split(steps["RUN"])
                assert (pip, install) == ("pip", "install")
                for package in packages:
                    if not package.startswith("--"):
                        assert_extras_exist(package)
                semel, *arguments = json.loads(steps["ENTRYPOINT"]) + json.loads(steps["CMD"])
                assert semel == "semel"
                assert_command_exists(arguments)


def test_a_deployment_runs_a_command_that_exists_and_gives_it_time_to_stop():
    runner = RunnerSettings()
    needed = runner.stop_seconds + runner.cancel_seconds + STOP_SECONDS
    texts = [block.text for page in PAGES for block in blocks(page) if block.kind == "yaml"]
    found = [document for text in texts if "kind" in (document := yaml.safe_load(text) or {})]
    assert [document["kind"] for document in found] == ["Deployment"]
    for document in found:
        pod = document["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > needed
        for container in pod["containers"]:
            assert_command_exists(container["args"])


def assert_extras_exist(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.fullmatch(r"semel(?:\[([\w,-]+)\])?", package)
    assert named, package
    assert set((named[1] or "files").split(",")) <= set(project["optional-dependencies"])


def assert_command_exists(arguments: list[str]) -> None:
    import typer.main

    from semel.cli.app import app

    command = typer.main.get_command(app)
    words = list(arguments)
    while words and not words[0].startswith("-") and hasattr(command, "commands"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command = command.commands[words.pop(0)]
    options = {word.split("=")[0] for word in words if word.startswith("-")}

    assert options <= {option for parameter in command.params for option in parameter.opts}
