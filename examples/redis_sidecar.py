"""A program as the server: `launch_command` around a real redis-server, used as a feature store.

    python examples/redis_sidecar.py                     reads and writes, then ends with code 0
    python examples/redis_sidecar.py --kill-after 2000   redis is killed on the way; the job ends with code 1

Needs `redis-server` on PATH (Debian's package of that name). Redis listens on a Unix socket in a folder of its own, so
that no port is taken; the client speaks its protocol (https://redis.io/docs/latest/develop/reference/protocol-spec/)
over a plain socket, and retries for ever, as clients do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from watchdog.process import ProcessWatchdog

_RETRY_PAUSE = 0.02  # seconds


class FeatureStore:
    """As much of a redis client as the example needs."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._socket: socket.socket | None = None

    def command(self, *words: str) -> str | None:
        """Send one command and wait for its answer: a string, or None for "no such key". Never gives up.

        Raises ValueError for an error that redis answers.
        """
        request = "".join([f"*{len(words)}\r\n", *(f"${len(word.encode())}\r\n{word}\r\n" for word in words)]).encode()
        while True:
            try:
                kind, text = self._ask(request)
                break
            except OSError:
                self.close()
                time.sleep(_RETRY_PAUSE)
        if kind == "-":
            raise ValueError(text)
        return text

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, request: bytes) -> tuple[str, str | None]:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(self._path)
        self._socket.sendall(request)
        with self._socket.makefile("rb") as answer:
            line = self._line(answer.readline())
            if line[0] != "$":
                return line[0], line[1:]
            length = int(line[1:])
            return "$", None if length < 0 else answer.read(length + 2)[:-2].decode()

    @staticmethod
    def _line(data: bytes) -> str:
        if not data.endswith(b"\r\n"):
            raise ConnectionResetError("redis closed the connection")
        return data[:-2].decode()


def main() -> None:
    """Launch redis, use it, and end."""
    parser = argparse.ArgumentParser(description="A redis-server under watch.")
    parser.add_argument("--steps", type=int, default=5000, help="reads and writes (default: %(default)s)")
    parser.add_argument("--kill-after", type=int, metavar="STEPS", help="SIGKILL redis then, as the OOM killer would")
    options = parser.parse_args()
    redis = shutil.which("redis-server")
    if redis is None:
        sys.exit("redis-server is not on PATH; on Debian: apt-get install redis-server")

    with tempfile.TemporaryDirectory() as folder, ProcessWatchdog("redis") as watchdog:
        path = Path(folder) / "redis.sock"
        settings = ["--port", "0", "--unixsocket", str(path), "--dir", folder, "--save", "", "--logfile", "redis.log"]
        process = watchdog.launch_command([redis, *settings])
        if process is None:
            sys.exit("this example runs on one rank, and the local rank of this process is not 0")
        store = FeatureStore(path)
        store.command("PING")
        print(f"redis: pid {process.pid}", flush=True)
        start = time.monotonic()
        for step in range(options.steps):
            if step == options.kill_after:
                print(f"step {step}: SIGKILL to redis", flush=True)
                os.kill(process.pid, signal.SIGKILL)
            store.command("SET", f"node:{step % 77}", str(step))
            if store.command("GET", f"node:{step % 77}") != str(step):
                sys.exit(f"step {step}: redis gave back something else")
        store.close()
        print(f"{options.steps} reads and writes in {time.monotonic() - start:.2f} s", flush=True)
    print(f"redis has ended with code {process.returncode}")


if __name__ == "__main__":
    main()
