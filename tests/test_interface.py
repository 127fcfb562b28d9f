"""The public names and signatures, which users rely on."""

from __future__ import annotations

import importlib
import inspect

import pytest

import watchdog
from watchdog.death import Cause, Death, Exited, Lost, Signalled
from watchdog.process import ProcessWatchdog

SIGNATURES = {
    "process.ProcessWatchdog": "(name='server', *, poll_interval=1.0, expected_exit_codes=(0,), on_death=None, signal_grace=5.0)",
    "process.ProcessWatchdog.launch": "(self, target, args=(), kwargs=None, *, context=None, local_rank=0, daemon=True)",
    "process.ProcessWatchdog.launch_command": "(self, argv, *, local_rank=0, env=None, cwd=None)",
    "process.ProcessWatchdog.watch": "(self, process)",
    "process.ProcessWatchdog.disarm": "(self)",
    "process.ProcessWatchdog.stop": "(self, timeout=5.0)",
    "abort.abort": "(death)",
    "abort.interrupt": "(death)",
    "parent.exit_with_parent": "(parent_pid=None, *, check_interval=5.0, exit_code=1)",
    "parent.ParentWatchdog": "(parent_pid=None)",
    "parent.ParentWatchdog.is_alive": "(self)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    module, *path = name.split(".")
    found = importlib.import_module(f"watchdog.{module}")
    for part in path:
        found = getattr(found, part)
    signature = inspect.signature(found)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=signature.empty)) == SIGNATURES[name]


def test_names_of_the_package():
    names = {"Cause", "Death", "Exited", "Lost", "ParentWatchdog", "ProcessWatchdog", "ServerDied", "Signalled"}
    assert set(watchdog.__all__) == names | {"abort", "exit_with_parent", "interrupt"}
    assert all(hasattr(watchdog, name) for name in watchdog.__all__)


def test_properties():
    fresh = ProcessWatchdog()
    assert (fresh.name, fresh.process, fresh.armed, fresh.death) == ("server", None, False, None)


def test_a_death_is_a_value():
    """Immutable, comparable, hashable, picklable; statuses of different kinds differ."""
    import pickle

    death = Death("sampler", 4127, Signalled(9), 312.4, Cause.SIGNAL)
    assert (
        death == pickle.loads(pickle.dumps(death)) == Death("sampler", 4127, Signalled(9, False), 312.4, Cause.SIGNAL)
    )
    assert hash(death) == hash(pickle.loads(pickle.dumps(death)))
    assert death.exitcode == -9
    assert Exited(9) != Signalled(9) != Lost() == Lost()
    assert Death("a", None, Lost()).exitcode is None
    with pytest.raises(AttributeError, match="immutable"):
        death.name = "other"
    with pytest.raises(AttributeError, match="immutable"):
        del death.status
    assert str(death) == "sampler (pid 4127) died after 312.4 s: killed by SIGKILL (exit code -9)"
    assert repr(Signalled(11, True)) == "Signalled(signal=11, core_dumped=True)"
    assert "SIGSEGV (exit code -11), core dumped" in str(Signalled(11, True))
    assert death.as_dict()["status"] == {"kind": "signalled", "signal": 9, "core_dumped": False}
    assert Death("a", 1, Lost()).as_dict()["status"] == {"kind": "lost"}
    assert list(death.as_dict()) == list(Death.__slots__)
