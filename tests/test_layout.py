"""The floors of the package: imports point down only, and importing does nothing.

A new module gets its floor here first. The checks read the source, so that an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "watchdog"

# From the ground up; a module imports from the floors below its own. Some are named before they exist.
FLOORS = (
    {"death", "errors", "arguments", "bounded"},
    {"linux", "delivery"},
    {"handles", "record", "diagnosis", "rank", "torchelastic"},
    {"abort", "guardian"},
    {"watching", "server"},
    {"process", "parent", "workers", "prefetch"},  # the tools
    {"cli"},
    {"__init__"},
)
FLOOR = {module: number for number, floor in enumerate(FLOORS) for module in floor}
SIDEWAYS = {("errors", "death")}  # (who, whom) on one floor

# What the guardian, run without site-packages, is made of: these import one another and the standard library.
GUARDIAN = {"death", "errors", "linux", "diagnosis", "torchelastic", "guardian"}
# The others may need psutil too.
DEPENDENCIES = {"psutil"}
MAX_LINES = 400


def imports(package: Path) -> dict[str, set[str]]:
    """What every module of `package` imports: its siblings by stem, all else by its top-level name and a slash."""
    return {path.stem: set(_imports(path, package.name)) for path in sorted(package.rglob("*.py"))}


def _imports(path: Path, package: str):
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join(filter(None, [package if node.level else "", node.module]))
            # Below the package's own name stand modules; what is none comes from `__init__`.
            names = [f"{origin}.{alias.name}" for alias in node.names] if origin == package else [origin]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            module = rest.partition(".")[0]
            if top != package:
                yield f"{top}/"
            elif module and path.with_name(f"{module}.py").exists():
                yield module
            else:
                yield "__init__"


def violations(package: Path) -> list[str]:
    found = []
    graph = imports(package)
    for who, whoms in graph.items():
        if who not in FLOOR:
            found.append(f"{who} has no floor in this table")
            continue
        for whom in sorted(whoms):
            if whom.endswith("/"):
                if who in GUARDIAN and whom[:-1] in DEPENDENCIES:
                    found.append(f"{who} imports {whom[:-1]}, and is to work with the standard library only")
            elif who in GUARDIAN and whom not in GUARDIAN:
                found.append(f"{who} imports {whom}, which the guardian is not made of")
            elif FLOOR.get(whom, -1) >= FLOOR[who] and (who, whom) not in SIDEWAYS:
                found.append(f"{who} imports {whom}, which is not below it")
    siblings = {who: {whom for whom in whoms if not whom.endswith("/")} for who, whoms in graph.items()}
    try:
        graphlib.TopologicalSorter(siblings).prepare()
    except graphlib.CycleError as error:
        found.append("a cycle: " + " - ".join(error.args[1]))
    return found


def test_imports_point_down():
    graph = imports(PACKAGE)
    assert {"death", "handles"} <= graph["watching"], "the imports are not seen"
    assert violations(PACKAGE) == []


@pytest.mark.skipif(not hasattr(sys, "stdlib_module_names"), reason="sys.stdlib_module_names came with Python 3.10")
def test_no_dependency_but_psutil():
    outside = {
        name[:-1] for names in imports(PACKAGE).values() for name in names if name.endswith("/")
    } - sys.stdlib_module_names
    assert outside <= DEPENDENCIES


def test_no_file_grows_too_long():
    lines = {path.name: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("linux", "from watchdog import abort", "linux imports abort, which the guardian is not made of"),
        ("record", "from watchdog.watching import Watch", "record imports watching, which is not below it"),
        ("record", "import watchdog.watching", "record imports watching, which is not below it"),
        ("record", "from . import watching", "record imports watching, which is not below it"),
        ("record", "from .watching import Watch", "record imports watching, which is not below it"),
        ("record", "def later():\n    from watchdog import watching", "record imports watching, which is not below it"),
        ("parent", "from watchdog import process", "parent imports process, which is not below it"),
        ("process", "from watchdog import Death", "process imports __init__, which is not below it"),
        ("process", "import watchdog", "process imports __init__, which is not below it"),
        ("death", "from watchdog import errors", "death imports errors, which is not below it"),
        ("diagnosis", "import psutil", "diagnosis imports psutil, and is to work with the standard library only"),
        ("novelty", "", "novelty has no floor in this table"),
    ],
)
def test_a_crossed_floor_is_seen(module, source, said, tmp_path):
    package = tmp_path / "watchdog"
    package.mkdir()
    for name in ("__init__", "death", "errors", "linux", "record", "abort", "watching", "process"):
        (package / f"{name}.py").write_text("")
    assert violations(package) == []
    (package / f"{module}.py").write_text(source)
    assert violations(package) == [said]


def test_a_cycle_is_seen(tmp_path):
    package = tmp_path / "watchdog"
    package.mkdir()
    (package / "errors.py").write_text("from watchdog import death")
    (package / "death.py").write_text("def later():\n    from watchdog.errors import ServerDied")
    assert "a cycle: " in violations(package)[-1]


# Imports the modules that it is given, and prints in what the process differs afterwards. The modules of the standard
# library whose own import leaves a trace are imported before. torch and its like are empty stand-ins on the path, so
# that an import of them shows where they are not installed, too.
PROBE = """
import atexit, concurrent.futures, faulthandler, importlib, json, logging, multiprocessing.util, os, random, signal, sys
import subprocess, threading, warnings

stand_ins, checkout, *modules = sys.argv[1:]
sys.path[:0] = [stand_ins, checkout]
at_fork = []
register_at_fork = os.register_at_fork

def noting_register_at_fork(**hooks):
    at_fork.append(sys._getframe(1).f_globals["__name__"])
    register_at_fork(**hooks)

os.register_at_fork = noting_register_at_fork

def state():
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1,
        "descriptors": sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else [],
        "signal handlers": {int(n): repr(signal.getsignal(n)) for n in signal.valid_signals()},
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "wake-up descriptor": wakeup,
        "exit hooks": atexit._ncallbacks(),
        "finalizers": len(multiprocessing.util._finalizer_registry),
        "fork hooks": list(at_fork),
        "log handlers": [repr(h) for name in (None, "watchdog", "watchdog.process")
                         for h in logging.getLogger(name).handlers],
        "log levels": [logging.getLogger(name).level for name in (None, "watchdog", "watchdog.process")],
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook), sys.gettrace()],
        "faulthandler": faulthandler.is_enabled(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "switch interval": sys.getswitchinterval(),
        "warning filters": len(warnings.filters),
        "environment": dict(os.environ),
        "heavy modules": sorted({"torch", "numpy", "psutil"} & set(sys.modules)),
    }

before = state()
for module in modules:
    importlib.import_module(module)
after = state()
print(json.dumps(sorted(key for key in after if after[key] != before[key])))
"""


@pytest.fixture
def changed_by_importing(tmp_path):
    for heavy in ("torch", "numpy", "psutil"):
        (tmp_path / f"{heavy}.py").write_text("")

    def probe(*modules: str) -> list[str]:
        # -I: what the environment asks for (PYTHONFAULTHANDLER, PYTHONWARNINGS) is not the package's doing.
        command = [sys.executable, "-I", "-c", PROBE, str(tmp_path), str(PACKAGE.parent), *modules]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return probe


def test_importing_does_nothing(changed_by_importing):
    assert changed_by_importing("watchdog.process") == []


def test_importing_any_module_does_nothing(changed_by_importing):
    modules = [f"watchdog.{path.stem}" for path in PACKAGE.glob("*.py") if path.stem != "__init__"]
    assert changed_by_importing("watchdog", *modules) == []


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            ["native threads", "threads"],
        ),
        ("import os; os.register_at_fork(after_in_child=id)", ["fork hooks"]),
        ("import atexit; atexit.register(id)", ["exit hooks"]),
        ("from multiprocessing.util import Finalize; Finalize(None, id, exitpriority=1)", ["finalizers"]),
        ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", ["signal handlers"]),
        ("import logging; logging.basicConfig()", ["log handlers"]),
        ("import logging; logging.getLogger('watchdog.process').addHandler(logging.NullHandler())", ["log handlers"]),
        ("import multiprocessing; multiprocessing.set_start_method('spawn')", ["start method"]),
        ("import os; os.environ['MARK'] = '1'; pipe = os.pipe()", ["descriptors", "environment"]),
        ("import torch", ["heavy modules"]),
        ("import numpy", ["heavy modules"]),
        ("import psutil", ["heavy modules"]),
    ],
)
def test_what_importing_does_is_seen(source, changes, changed_by_importing, tmp_path):
    (tmp_path / "careless.py").write_text(source)
    assert changed_by_importing("careless") == changes


def ends_a_process(source: str) -> list[str]:
    """The calls in `source` that end the process it runs in."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in {"os._exit", "sys.exit", "os.abort", "os.kill", "signal.raise_signal"}:
                found.append(name)
    return found


def test_only_abort_ends_the_process():
    """`os.kill` elsewhere signals other processes: linux looks with 0, handles ends servers."""
    allowed = {"linux.py": {"os.kill"}, "handles.py": {"os.kill"}, "abort.py": {"os._exit", "os.kill"}}
    for path in PACKAGE.rglob("*.py"):
        assert set(ends_a_process(path.read_text())) <= allowed.get(path.name, set()), path.name
    assert ends_a_process("import os\nos._exit(1)") == ["os._exit"], "an exit is not seen"


def test_windows_is_told_so():
    """At import, and before anything that only POSIX has."""
    code = "import runpy, sys; sys.platform = 'win32'; sys.modules['fcntl'] = None; runpy.run_path(sys.argv[1])"
    run = subprocess.run([sys.executable, "-c", code, str(PACKAGE / "linux.py")], capture_output=True, text=True)
    assert "ImportError: sidecar-watchdog needs a POSIX system" in run.stderr
