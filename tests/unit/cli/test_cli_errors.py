"""What is wrong with a command is one line that names the thing and the way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from semel.cli.answer import MEANS, ExitCode, exit_code_of
from semel.cli.render import lasting
from semel.errors import Fenced, LeaseHeld, Misuse, NeedsOperator, Permanent, Retryable
from semel.memory.sink import MemorySink
from semel.spark.supervise import Exit
from tests.unit.cli.cli_world import MODULE, Shell, World, publish, shell_for

SEMEL = Path(sys.executable).with_name("semel")


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    return shell_for(monkeypatch, World().start())


def error_of(shell: Shell, *arguments: str, code: int = 2) -> str:
    done = shell.type(*arguments)
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("command", ["status", "doctor", "history"])
def test_without_a_target_the_options_are_named(shell, command):
    line = error_of(shell, command)

    assert "--ledger" in line
    assert "--pipeline" in line


@pytest.mark.parametrize("command", ["recover", "verify", "lint"])
def test_commands_that_ask_sinks_need_a_pipeline(shell, command):
    assert "--pipeline" in error_of(shell, command)


def test_a_ledger_and_a_pipeline_exclude_each_other(shell):
    line = error_of(shell, "status", "--ledger", "sqlite:///x", "--pipeline", f"{MODULE}:driver")

    assert "not both" in line


def test_a_url_of_another_kind_is_named_without_its_password(shell):
    line = error_of(shell, "status", "--ledger", "mysql://ann:secret@host/db")

    assert "mysql://ann:***@host/db" in line
    assert "sqlite:///" in line


def test_a_ledger_in_memory_cannot_be_reached_from_here(shell):
    assert "--pipeline" in error_of(shell, "status", "--ledger", "memory:")


def test_an_unreachable_ledger_is_to_be_tried_later_and_keeps_its_secret(shell):
    url = "postgresql://ann:secret@127.0.0.1:1/db"

    line = error_of(shell, "status", "--ledger", url, code=75)
    debugged = shell.type("status", "--ledger", url, "--debug")

    assert "127.0.0.1:1" in line
    assert "secret" not in line
    assert "Traceback" in debugged.stderr
    assert "secret" not in debugged.stderr


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("payments", "module:name"),
        ("no_such_module:x", "there is no module 'no_such_module'"),
        (f"{MODULE}:nothing", "has no 'nothing'; it has: driver, number, Kind"),
        (f"{MODULE}:number", "found a int"),
        (f"{MODULE}:Kind", "found the class Kind"),
        (f"{MODULE}:returns_text", "it returned a str"),
        (f"{MODULE}:fails", "calling it raised ValueError: no config"),
        ("broken_module:x", "importing module broken_module raised ZeroDivisionError"),
        ("needy_module:x", "needs 'not_installed_anywhere'"),
        ("leaving_module:x", "__main__"),
    ],
)
def test_a_wrong_pipeline_names_the_module_and_what_was_found(
    shell, monkeypatch, tmp_path, spec, words
):
    def fails():
        raise ValueError("no config")

    class Kind:
        """Not a pipeline."""

    publish(
        monkeypatch,
        driver=shell.world.driver,
        number=7,
        Kind=Kind,
        returns_text=lambda: "text",
        fails=fails,
    )
    (tmp_path / "broken_module.py").write_text("1 / 0")
    (tmp_path / "needy_module.py").write_text("import not_installed_anywhere")
    (tmp_path / "leaving_module.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    line = error_of(shell, "lint", "--pipeline", spec)

    assert spec in line
    assert words in line


def test_a_function_that_makes_the_pipeline_is_called(shell, monkeypatch):
    publish(monkeypatch, make=lambda: shell.world.driver)

    done = shell.type("status", "--pipeline", f"{MODULE}:make", "--json")

    assert json.loads(done.stdout)["scopes"][0]["scope"] == "shop/main"


def test_what_the_module_prints_is_kept_out_of_the_document(shell, monkeypatch):
    def make():
        print("loading settings")
        return shell.world.driver

    publish(monkeypatch, make=make)

    done = shell.type("status", "--pipeline", f"{MODULE}:make", "--json")

    assert json.loads(done.stdout)["command"] == "status"
    assert "loading settings" in done.stderr


def test_an_unstarted_pipeline_has_no_ledger_yet_and_gets_none(monkeypatch, tmp_path, shell):
    from semel.spark.exactly_once import ExactlyOnce

    ledger = f"sqlite:///{tmp_path / 'new.ledger'}"
    publish(monkeypatch, shop=ExactlyOnce("shop", ledger, [MemorySink()]))

    line = error_of(shell, "recover", "--pipeline", f"{MODULE}:shop", "--dry-run")

    assert "there is no ledger" in line
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_our_own_is_one_line_with_its_own_code(shell, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("oops")

    monkeypatch.setattr("semel.cli.commands.look.status_of", broken)

    line = error_of(shell, "status", "--pipeline", f"{MODULE}:driver", code=70)

    assert "RuntimeError: oops" in line
    assert "--debug" in line


def test_exit_codes_agree_with_those_of_a_supervised_query():
    assert ExitCode.OK == Exit.DONE
    assert ExitCode.FENCED == Exit.FENCED
    assert ExitCode.OPERATOR == Exit.OPERATOR
    assert ExitCode.TRY_LATER == Exit.GAVE_UP
    assert ExitCode.INTERRUPTED == Exit.INTERRUPTED
    assert set(MEANS) == set(ExitCode)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Misuse("x"), ExitCode.USAGE),
        (LeaseHeld("s", "o", 1.0), ExitCode.FENCED),
        (Fenced("x"), ExitCode.FENCED),
        (Retryable("x"), ExitCode.TRY_LATER),
        (NeedsOperator("x"), ExitCode.OPERATOR),
        (Permanent("x"), ExitCode.OPERATOR),
        (KeyError("x"), ExitCode.BUG),
    ],
)
def test_every_error_has_its_exit_code(error, code):
    assert exit_code_of(error) is code


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.34, "340 ms"),
        (1.0, "1.0 s"),
        (12.4, "12 s"),
        (59.7, "1 min"),
        (312, "5 min 12 s"),
        (3600, "1 h"),
        (11100, "3 h 5 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations_read_well(seconds, words):
    assert lasting(seconds) == words


def semel(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SEMEL_")}
    return subprocess.run(
        [str(SEMEL), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


PROGRAM = """
from semel import Driver, ExactlyOnce
from semel.sinks import MemorySink

print("hello from the module")
pipeline = ExactlyOnce("shop", "sqlite:///shop.ledger", [MemorySink("left", rows="struct(id)")])
"""


def test_the_installed_command_works_in_a_folder_of_the_users(tmp_path):
    (tmp_path / "shop.py").write_text(PROGRAM)

    linted = semel("lint", "--pipeline", "shop:pipeline", "--json", cwd=tmp_path)
    missing = semel("status", "--pipeline", "shop:pipeline", "--json", cwd=tmp_path)
    wrong = semel("no-such-command", cwd=tmp_path)
    version = semel("--version", cwd=tmp_path)

    assert json.loads(linted.stdout)["sinks"][0]["sink"] == "left"
    assert "hello from the module" in linted.stderr
    assert missing.returncode == 2
    assert "there is no ledger" in json.loads(missing.stdout)["error"]
    assert not (tmp_path / "shop.ledger").exists()
    assert wrong.returncode == 2
    assert version.stdout.startswith("semel ")


def test_help_names_the_exit_codes_and_needs_no_spark(tmp_path):
    done = semel("--help", cwd=tmp_path)

    assert done.returncode == 0
    for code in ExitCode:
        assert f" {code.value}: " in done.stdout
    code = "import sys; import semel.cli.app; sys.exit('pyspark' in sys.modules)"
    bare = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert bare.returncode == 0


@pytest.mark.parametrize(
    "command",
    ["status", "doctor", "recover", "verify", "history", "lint", "adopt",
     "cycle resolve", "ledger check", "ledger backup", "ledger restore"],
)  # fmt: skip
def test_every_command_has_help_with_an_example(shell, command):
    done = shell.type(*command.split(), "--help")

    assert done.exit_code == 0
    assert f"Example: semel {command}" in " ".join(done.output.split())
    assert "--json" in done.output
