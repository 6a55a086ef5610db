"""Commands that other packages add to `epochkv`, found by their entry points in a real process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

GREET = '''
import typer
app = typer.Typer()

@app.command()
def greet(name: str) -> None:
    """Greet somebody."""
    if name == "nobody":
        import no_such_library
    print(f"hello {name}")
    raise typer.Exit(2 if name == "two" else 0)
'''


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with an installed package that adds `greet`, `broken` (its module is not there) and a `reset` of its own."""
    (tmp_path / "greeting.py").write_text(GREET)
    info = tmp_path / "greeting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    entries = ("greet = greeting:app [polite]", "broken = left_out.of_this_image:app", "reset = greeting:app")
    (info / "entry_points.txt").write_text("[epochkv.commands]\n" + "\n".join(entries) + "\n")
    return tmp_path


def epochkv(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "epochkv_fence.cli", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True, timeout=60, check=False)


def test_an_added_command_is_listed_explained_and_run(packages: Path) -> None:
    listed = epochkv(packages, "--help").stdout
    assert "Greet somebody." in listed
    assert "broken" not in listed
    assert "Greet somebody." in epochkv(packages, "greet", "--help").stdout
    assert epochkv(packages, "greet", "you").stdout == "hello you\n"
    assert epochkv(packages, "greet", "two").returncode == 2


def test_a_missing_library_is_named_with_what_to_install(packages: Path) -> None:
    done = epochkv(packages, "greet", "nobody")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "epochkv: no_such_library is not installed, and `epochkv greet` needs it; install epochkv[polite]\n"


def test_a_command_without_its_module_is_no_command(packages: Path) -> None:
    done = epochkv(packages, "broken")
    assert done.returncode == 2
    assert "No such command" in done.stderr


def test_our_own_commands_cannot_be_replaced(packages: Path) -> None:
    assert "Make all KV of the pool unreachable" in epochkv(packages, "reset", "--help").stdout
