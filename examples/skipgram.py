"""A training job that waits for a server: skip-gram with negative sampling on the graph of Les Misérables.

Random walks over the graph are its sentences; each step trains on a batch of (node, node nearby) pairs, and fetches
their negatives from the sampler process that `ProcessWatchdog` launched. In pure Python, on one core. Run it, and kill
the sampler by the pid that it prints; then again with --no-watchdog.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import random
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from negative_sampler import EDGES, Address, Graph, SamplerClient, serve

from watchdog.process import ProcessWatchdog

_DIMENSIONS = 16
_LEARNING_RATE = 0.05
_WALK_LENGTH = 10  # nodes
_WINDOW = 2  # a context is at most so many nodes away in its walk
_BATCH = 16  # pairs a step
_NEGATIVES = 5  # a pair

Pair = tuple[int, int]


def start_sampler(context: Any, seed: int, *, watched: bool) -> tuple[BaseProcess, Address]:
    """Start the sampler in a process of its own; returns it with its address once it serves."""
    # Our copy of the write end stays open until the address is there. Without it a sampler that dies at its start would
    # give us an EOFError here, and we would leave with that before the watchdog has told the reason.
    reader, writer = context.Pipe(duplex=False)
    args = (writer, EDGES, seed)
    if watched:
        watchdog = ProcessWatchdog("sampler")
        process = watchdog.launch(serve, args=args, context=context)
        if process is None:
            sys.exit("this example trains on one rank, and the local rank of this process is not 0")
    else:
        process = context.Process(target=serve, args=args, daemon=True)
        process.start()
    return process, reader.recv()


def walks(graph: Graph, random_source: random.Random) -> Iterator[list[int]]:
    """Random walks without end, along edges in proportion to their weights, from every node in turn."""
    steps = [(list(neighbours), list(itertools.accumulate(neighbours.values()))) for neighbours in graph.neighbours]
    for start in itertools.cycle(range(len(steps))):
        walk = [start]
        while len(walk) < _WALK_LENGTH:
            neighbours, cumulative = steps[walk[-1]]
            walk += random_source.choices(neighbours, cum_weights=cumulative)
        yield walk


def pairs(graph: Graph, random_source: random.Random) -> Iterator[Pair]:
    """(center, context) pairs of the walks, without end."""
    for walk in walks(graph, random_source):
        for position, center in enumerate(walk):
            nearby = walk[max(0, position - _WINDOW) : position] + walk[position + 1 : position + 1 + _WINDOW]
            yield from ((center, context) for context in nearby if context != center)


class SkipGram:
    """Two vectors a node, as center and as context, trained by plain gradient descent."""

    def __init__(self, nodes: int, random_source: random.Random) -> None:
        spread = 0.5 / _DIMENSIONS
        self._centers = [[random_source.uniform(-spread, spread) for _ in range(_DIMENSIONS)] for _ in range(nodes)]
        self._contexts = [[0.0] * _DIMENSIONS for _ in range(nodes)]

    def train(self, center: int, context: int, negatives: list[int]) -> float:
        """One step on one pair and its negatives; returns the loss before the step."""
        vector = self._centers[center]
        change = [0.0] * _DIMENSIONS
        loss = 0.0
        for node, wanted in ((context, 1.0), *((negative, 0.0) for negative in negatives)):
            other = self._contexts[node]
            predicted = _sigmoid(_dot(vector, other))
            loss -= math.log(predicted if wanted else 1.0 - predicted)
            rate = _LEARNING_RATE * (wanted - predicted)
            change = [total + rate * value for total, value in zip(change, other)]
            self._contexts[node] = [value + rate * own for value, own in zip(other, vector)]
        self._centers[center] = [own + value for own, value in zip(vector, change)]
        return loss

    def nearest(self, node: int, count: int) -> list[int]:
        """The nodes whose vectors point most nearly the same way, by cosine."""
        vector = self._centers[node]
        norms = [math.sqrt(_dot(other, other)) for other in self._centers]
        others = [other for other in range(len(norms)) if other != node]
        return sorted(others, key=lambda other: -_dot(vector, self._centers[other]) / norms[other])[:count]


def _dot(one: list[float], other: list[float]) -> float:
    return sum(map(float.__mul__, one, other))


def _sigmoid(value: float) -> float:
    # Beyond 15 the logarithm of what is left of 1.0 has no digits to speak of.
    return 1.0 / (1.0 + math.exp(-max(-15.0, min(15.0, value))))


def train(graph: Graph, client: SamplerClient, *, steps: int, report_every: int, seed: int) -> SkipGram:
    """Train for `steps` batches; prints the mean loss of a pair every `report_every` steps."""
    random_source = random.Random(seed)
    model = SkipGram(len(graph.names), random_source)
    source = pairs(graph, random_source)
    total = 0.0
    for step in range(1, steps + 1):
        batch = list(itertools.islice(source, _BATCH))
        negatives = client.negatives([center for center, _ in batch], _NEGATIVES)
        total += sum(model.train(*pair, others) for pair, others in zip(batch, negatives)) / _BATCH
        if step % report_every == 0:
            print(f"step {step:5}  loss {total / report_every:.3f}", flush=True)
            total = 0.0
    return model


def main() -> None:
    """Start the sampler, train, print what was learnt."""
    parser = argparse.ArgumentParser(description="Train node vectors with negatives from a sampler process.")
    parser.add_argument("--steps", type=int, default=2000, help="batches to train on (default: %(default)s)")
    parser.add_argument("--report-every", type=int, default=200, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--start-method", choices=multiprocessing.get_all_start_methods(), help="default: the system's")
    parser.add_argument("--no-watchdog", action="store_true", help="start the sampler as a plain daemonic process")
    options = parser.parse_args()

    context = multiprocessing.get_context(options.start_method)
    sampler, address = start_sampler(context, options.seed, watched=not options.no_watchdog)
    print(f"sampler: pid {sampler.pid}, port {address[1]}", flush=True)
    graph = Graph(EDGES)
    client = SamplerClient(address)
    model = train(graph, client, steps=options.steps, report_every=options.report_every, seed=options.seed)
    client.close()
    for name in ("Valjean", "Marius", "Enjolras"):
        nearest = model.nearest(graph.names.index(name), 4)
        print(f"nearest to {name}: {', '.join(graph.names[node] for node in nearest)}")


if __name__ == "__main__":
    main()
