"""The wheel, and that it shares an environment with PyPI's `watchdog`, which has the same import name.

Both are installed from wheels, outside the checkout, in either order, and then either is uninstalled. Installing the
second one overwrites `watchdog/__init__.py`, and uninstalling one takes it away: what is left must work without it.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "watchdog"
OURS, THEIRS = "sidecar-watchdog", "watchdog"
THEIR_VERSION = "6.0.0"
THEIR_MODULES = {"events", "observers", "tricks", "utils", "version", "watchmedo", "__main__"}

# What a user of each does, for real. Without anything of this checkout on the path: they run under `python -I`.
USES = {
    OURS: """
import sys, time
from watchdog.process import ProcessWatchdog

if __name__ == "__main__":
    import watchdog.process
    assert watchdog.process.__file__.startswith(sys.prefix), watchdog.process.__file__
    with ProcessWatchdog("packaged") as watched:
        assert watched.launch(time.sleep, (60,), context="spawn", local_rank=None).is_alive()
        assert watched.stop() == -15, watched.process
""",
    THEIRS: """
import pathlib, sys, tempfile, threading
from watchdog.observers import Observer
from watchdog.events import FileSystemEventHandler
import watchdog.events

assert watchdog.events.__file__.startswith(sys.prefix), watchdog.events.__file__
seen = threading.Event()
handler = FileSystemEventHandler()
handler.on_created = lambda event: seen.set()
with tempfile.TemporaryDirectory() as folder:
    observer = Observer()
    observer.schedule(handler, folder)
    observer.start()
    pathlib.Path(folder, "file").touch()
    assert seen.wait(30)
    observer.stop()
    observer.join()
""",
}


def pip(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def offline_pip(*arguments: object) -> None:
    done = pip("--isolated", *arguments)
    assert done.returncode == 0, f"pip {arguments}:\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """A folder with everything that is needed from an index, so that from there on nothing depends on one."""
    folder = tmp_path_factory.mktemp("wheels")
    build_backend = re.search(r'^requires = \["(.+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
    wanted = (build_backend, "psutil", f"{THEIRS}=={THEIR_VERSION}")
    done = pip("download", "--quiet", "--retries=1", "--timeout=15", "--only-binary=:all:", "--dest", folder, *wanted)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        pytest.skip(f"the wheels that this test installs cannot be had: {reason}")
    return folder


@pytest.fixture(scope="module")
def our_wheel(wheels, tmp_path_factory) -> Path:
    """Built from a copy, so that the build leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source") / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__"))
    offline_pip("wheel", "--no-deps", "--no-index", "--find-links", wheels, "--wheel-dir", wheels, copy)
    (wheel,) = wheels.glob("sidecar_watchdog-*.whl")
    return wheel


class Environment:
    """A virtual environment, and what can be used in it."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        venv.create(folder / "venv", symlinks=True)
        self._folder = folder
        self._wheels = wheels
        self._python = folder / "venv" / "bin" / "python"

    def install(self, distribution: str) -> None:
        source = ("--pre", "--no-index", "--find-links", self._wheels)
        offline_pip("--python", self._python, "install", *source, distribution)

    def uninstall(self, distribution: str) -> None:
        offline_pip("--python", self._python, "uninstall", "--yes", distribution)

    def usable(self) -> set[str]:
        return {distribution for distribution in USES if self._works(distribution)}

    def _works(self, distribution: str) -> bool:
        script = self._folder / f"use_{distribution.replace('-', '_')}.py"
        script.write_text(USES[distribution])
        command = [self._python, "-I", script]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self._folder, timeout=100)
        # Not to be had is an answer; to be had and broken is a failure.
        assert done.returncode == 0 or "ModuleNotFoundError: No module named 'watchdog" in done.stderr, done.stderr
        return done.returncode == 0


@pytest.mark.parametrize("removed", [OURS, THEIRS])
@pytest.mark.parametrize(("first", "second"), [(OURS, THEIRS), (THEIRS, OURS)])
def test_both_packages_live_in_one_environment(first, second, removed, wheels, our_wheel, tmp_path):
    environment = Environment(tmp_path, wheels)
    assert environment.usable() == set()
    environment.install(first)
    assert environment.usable() == {first}
    environment.install(second)
    assert environment.usable() == {first, second}
    environment.uninstall(removed)
    assert environment.usable() == {first, second} - {removed}


def test_wheel_holds_the_package_and_no_more(our_wheel):
    expected = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.suffix in (".py", ".typed")}
    assert {"watchdog/py.typed", "watchdog/process.py"} <= expected
    with zipfile.ZipFile(our_wheel) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_metadata(our_wheel):
    with zipfile.ZipFile(our_wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Name"] == OURS
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.9"
    always = [requirement for requirement in metadata.get_all("Requires-Dist") if "extra ==" not in requirement]
    assert [re.match(r"[\w-]+", requirement).group() for requirement in always] == ["psutil"]


def test_only_the_empty_files_are_in_both_wheels(wheels, our_wheel):
    (their_wheel,) = wheels.glob("watchdog-*.whl")
    with zipfile.ZipFile(our_wheel) as ours, zipfile.ZipFile(their_wheel) as theirs:
        both = set(ours.namelist()) & set(theirs.namelist())
        assert {name: theirs.read(name) for name in both} == {"watchdog/__init__.py": b"", "watchdog/py.typed": b""}
        modules = {name.split("/")[1].split(".")[0] for name in theirs.namelist() if name.startswith("watchdog/")}
    # The list that the next test goes by is complete. `__main__` is no module of theirs yet.
    assert modules - {"__init__", "py"} == THEIR_MODULES - {"__main__"}


def test_no_module_is_named_like_one_of_theirs():
    names = {path.stem for path in PACKAGE.iterdir()}
    assert "process" in names
    assert not names & THEIR_MODULES
