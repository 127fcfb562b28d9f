"""A negative sampler behind a socket: the server that a training job waits for.

For a node it draws nodes that are no neighbours of it, each with a probability proportional to its degree to the power
of 0.75, as word2vec does (Mikolov et al., https://arxiv.org/abs/1310.4546). Degrees are weighted: the sum of the
weights of a node's edges, which is how often a random walk comes by.

The protocol is one line of JSON each way, on a TCP connection that stays open; nodes are numbers:

    -> {"nodes": [10, 36], "count": 3}
    <- {"negatives": [[67, 50, 47], [48, 26, 20]]}
    -> {"nodes": [77], "count": 3}
    <- {"error": "ValueError('node 77 is not in 0..76')"}
"""

from __future__ import annotations

import csv
import itertools
import json
import random
import socket
import socketserver
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["EDGES", "Graph", "NegativeSampler", "SamplerClient", "serve"]

EDGES = Path(__file__).parent / "data" / "les_miserables.csv"
_POWER = 0.75
_RETRY_PAUSE = 0.05  # seconds between two attempts of a client to reach its server

Address = tuple[str, int]


class Graph:
    """An undirected, weighted graph. Nodes are numbered in the order of their first appearance."""

    def __init__(self, edges: Path) -> None:
        numbers: dict[str, int] = {}
        self.neighbours: list[dict[int, int]] = []  # of each node: its neighbours, and the weight of the edge
        with edges.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                ends = row["source"], row["target"]
                one, other = (numbers.setdefault(name, len(numbers)) for name in ends)
                self.neighbours += [{} for _ in range(len(numbers) - len(self.neighbours))]
                self.neighbours[one][other] = self.neighbours[other][one] = int(row["weight"])
        self.names = list(numbers)


class NegativeSampler:
    """Draws from the nodes of `graph` by degree ** 0.75, never a node's neighbour nor the node itself.

    Raises ValueError for a graph with a node that has no negative at all.
    """

    def __init__(self, graph: Graph, seed: int = 0) -> None:
        self._nodes = range(len(graph.names))
        weights = [sum(neighbours.values()) ** _POWER for neighbours in graph.neighbours]
        self._cumulative = list(itertools.accumulate(weights))
        self._excluded = [{node, *neighbours} for node, neighbours in enumerate(graph.neighbours)]
        for name, excluded in zip(graph.names, self._excluded):
            if len(excluded) == len(self._nodes):
                raise ValueError(f"{name} is a neighbour of every other node and has no negatives")
        self._random = random.Random(seed)

    def draw(self, node: int, count: int) -> list[int]:
        """`count` negatives of `node`, with repetition. Raises ValueError for a node that is not in the graph."""
        if node not in self._nodes:
            raise ValueError(f"node {node!r} is not in 0..{len(self._nodes) - 1}")
        excluded = self._excluded[node]
        drawn: list[int] = []
        # To draw again what was excluded leaves the proportions of the others as they are.
        while len(drawn) < count:
            candidates = self._random.choices(self._nodes, cum_weights=self._cumulative, k=count - len(drawn))
            drawn += [candidate for candidate in candidates if candidate not in excluded]
        return drawn


class _Handler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client died; that is for others to report
            for line in self.rfile:
                self.wfile.write(json.dumps(self._answer(line)).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            return {"negatives": [self.server.sampler.draw(node, request["count"]) for node in request["nodes"]]}
        except (ValueError, TypeError, KeyError) as error:
            return {"error": repr(error)}


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, sampler: NegativeSampler) -> None:
        self.sampler = sampler
        super().__init__(("127.0.0.1", 0), _Handler)


def serve(address: Connection, edges: Path = EDGES, seed: int = 0) -> None:
    """Serve until killed, on a port that the kernel chooses; (host, port) goes to `address` once clients may come.

    A port of the kernel's choice is free, also where the server of an earlier attempt still holds its own.
    """
    with _Server(NegativeSampler(Graph(edges), seed)) as server:
        address.send(server.server_address)
        server.serve_forever()


class SamplerClient:
    """What the training calls. It has no time-out and does not give up, as RPC clients of real samplers do not.

    For a server that restarts or a network that drops packets, this is what one wants. For a server that is dead and
    stays so, it is the silent hang: the caller sits in `negatives` for ever, and nothing is logged.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: socket.socket | None = None

    def negatives(self, nodes: Sequence[int], count: int) -> list[list[int]]:
        """`count` negatives for each of `nodes`; blocks until there is an answer.

        Raises ValueError if the server refuses the request.
        """
        request = json.dumps({"nodes": nodes, "count": count}).encode() + b"\n"
        while True:
            try:
                reply = json.loads(self._ask(request))
                break
            except OSError:
                self.close()
                time.sleep(_RETRY_PAUSE)
        if "error" in reply:
            raise ValueError(reply["error"])
        negatives: list[list[int]] = reply["negatives"]
        return negatives

    def close(self) -> None:
        """Idempotent; the next request connects anew."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, request: bytes) -> bytes:
        if self._connection is None:
            self._connection = self._connect()
        self._connection.sendall(request)
        reply = bytearray()
        while not reply.endswith(b"\n"):
            chunk = self._connection.recv(65536)
            if not chunk:
                raise ConnectionResetError("the sampler closed the connection")
            reply += chunk
        return bytes(reply)

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address)
        if connection.getsockname() == connection.getpeername():
            # On loopback, who calls a free port long enough may get that port for its own end. TCP then connects the
            # socket with itself (a simultaneous open, RFC 9293, 3.5), and we would take our request for the reply.
            connection.close()
            raise ConnectionRefusedError("connected with itself")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
