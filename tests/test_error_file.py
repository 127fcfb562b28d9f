"""The file that torchrun reads: schema, time, atomic, never over an older failure, never a reason not to leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import time

import pytest

SCRIPT = """
if __name__ == "__main__":
    ProcessWatchdog("sampler", signal_grace=float(sys.argv[2])).launch(targets.by_signal, (int(sys.argv[1]),), context="fork")
    block_in_c()
"""


def run(rank, path, number=9, grace=0.0, script=SCRIPT):
    job = rank(script, str(number), str(grace), env={"TORCHELASTIC_ERROR_FILE": str(path)})
    started = time.monotonic()
    assert job.wait() == 1
    assert time.monotonic() - started < 10
    assert len(job.reports()) == 1
    return job


def test_the_report_stands_where_the_summary_takes_it_from(rank, tmp_path):
    """Form A of the schema: the text under `py_callstack`, the time as a string of whole seconds."""
    path = tmp_path / "error.json"
    before = int(time.time())
    job = run(rank, path)
    content = json.loads(path.read_text())
    extra = content["message"]["extraInfo"]
    assert extra["py_callstack"].splitlines() == job.stderr.splitlines()
    assert content["message"]["message"] == f"ServerDied: {job.stderr.splitlines()[0]}"
    assert isinstance(extra["timestamp"], str)
    assert before <= int(extra["timestamp"]) <= time.time()
    assert content["event"]["status"] == {"kind": "signalled", "signal": 9, "core_dumped": False}
    assert os.listdir(tmp_path).count("error.json") == 1
    assert [name for name in os.listdir(tmp_path) if name.startswith("error.json.")] == []


def test_the_time_is_that_of_the_death(rank, tmp_path):
    """Not that of the exit, which waits for the grace."""
    path = tmp_path / "error.json"
    run(rank, path, number=15, grace=2.5)
    assert time.time() - int(json.loads(path.read_text())["message"]["extraInfo"]["timestamp"]) >= 2


def test_nothing_is_written_where_no_file_is_named(rank, tmp_path):
    """Unset, or empty as with a log folder of /dev/null."""
    run(rank, "")
    assert not [name for name in os.listdir(tmp_path) if "json" in name]


OLD = {"message": {"message": "mine", "extraInfo": {"py_callstack": "mine", "timestamp": "1000"}}}
LATE = {"message": {"message": "mine", "extraInfo": {"py_callstack": "mine", "timestamp": str(2**40)}}}


@pytest.mark.parametrize(
    ("content", "stands"),
    [
        (json.dumps(OLD), True),
        (json.dumps({"message": "form B", "timestamp": 1000}), True),
        (json.dumps({"message": "form B without a time, which counts as 0"}), True),
        (json.dumps(LATE), False),
        (json.dumps(OLD)[:40], False),
        ("", False),
        ("[]", False),
        ('"text"', False),
        ('{"message": {}}', False),
        ('{"message": {"extraInfo": {"timestamp": "soon"}}}', False),
        ('{"message": {"extraInfo": {"timestamp": null}}}', False),
        ("\udcff\udcfe", False),
    ],
)
def test_an_older_failure_stands_and_garbage_does_not(rank, tmp_path, content, stands):
    """The launcher itself dies of a file that it cannot read."""
    path = tmp_path / "error.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    run(rank, path)
    if stands:
        assert path.read_text() == content
    else:
        assert "sampler (pid" in json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]


def test_a_path_that_cannot_be_written_does_not_hold_the_exit(rank, tmp_path):
    """Its folder has vanished; it is a folder; its file system hangs."""
    run(rank, tmp_path / "vanished" / "error.json")
    folder = tmp_path / "folder.json"
    folder.mkdir()
    run(rank, folder)
    assert os.listdir(folder) == []
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)  # opening it blocks for ever, as a dead network file system does
    run(rank, fifo)
    assert fifo.is_fifo()


def test_a_full_disk_leaves_what_was_there(rank, tmp_path):
    """On a file system of its own, of one page."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        (mount / "filler").write_bytes(b"x" * 4096)
        run(rank, mount / "error.json")
        assert os.listdir(mount) == ["filler"]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_rank_that_dies_while_it_writes_leaves_no_half_file(rank, tmp_path):
    """SIGKILL between any two steps: the file is whole or not there."""
    path = tmp_path / "error.json"
    for step in ("open", "dump", "replace"):
        job = rank(
            textwrap.dedent(f"""
            import json, watchdog.torchelastic as module
            def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
            if {step!r} == "dump":
                def dump(content, file):
                    file.write(json.dumps(content)[:50])
                    file.flush()
                    die()
                json.dump = dump
            elif {step!r} == "replace":
                os.replace = die
            else:
                module.open = die
            """)
            + SCRIPT,
            "9",
            "0",
            env={"TORCHELASTIC_ERROR_FILE": str(path)},
        )
        assert job.process.wait(60) == -signal.SIGKILL
        assert not path.exists()


def test_the_main_thread_cannot_write_over_it(rank, tmp_path):
    """@record looks for its file when it fails: from the abort on there is none."""
    path = tmp_path / "error.json"
    job = run(
        rank,
        path,
        script="""
class Late(logging.Handler):
    def emit(self, record):
        say("variable", os.environ.get("TORCHELASTIC_ERROR_FILE"))
if __name__ == "__main__":
    logging.basicConfig(handlers=[Late(), logging.StreamHandler()])
"""
        + SCRIPT.split("\n", 2)[2],
    )
    assert job.expect("variable ") == "None"
