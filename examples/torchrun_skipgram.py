"""The same job under torchrun: data-parallel skip-gram whose DataLoader workers ask the sampler.

    torchrun --nproc-per-node 4 examples/torchrun_skipgram.py

Local rank 0 launches the sampler and tells the others its address. Each rank draws batches through a DataLoader with a
worker of its own, which fetches the negatives; the gradients are averaged by gloo. If the sampler dies, every worker
retries for ever, every rank waits for its worker or in the all-reduce, and without the watchdog the job would end with
gloo's time-out half an hour later.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections.abc import Iterator
from multiprocessing import Pipe

import torch
import torch.distributed as dist
from negative_sampler import EDGES, Address, Graph, SamplerClient, serve
from skipgram import pairs
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from watchdog.process import ProcessWatchdog

_DIMENSIONS = 16
_BATCH = 64  # pairs a step and rank
_NEGATIVES = 5  # a pair

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class NegativeSamplingDataset(IterableDataset[Batch]):
    """Batches of (centers, contexts, negatives), without end. The worker connects to the sampler by itself."""

    def __init__(self, address: Address, seed: int) -> None:
        self._address = address
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        client = SamplerClient(self._address)
        source = pairs(Graph(EDGES), random.Random(self._seed))
        while True:
            centers, contexts = zip(*itertools.islice(source, _BATCH))
            negatives = client.negatives(centers, _NEGATIVES)
            yield torch.tensor(centers), torch.tensor(contexts), torch.tensor(negatives)


def say(text: str) -> None:
    """One write: torchrun's ranks are unbuffered, where `print` writes the end of the line by itself."""
    sys.stdout.write(f"{text}\n")


def start_sampler() -> Address:
    """On local rank 0 the sampler is launched; all ranks of the node get its address."""
    address: list[Address | None] = [None]
    # Both ends stay open until the address is there: a sampler that dies at its start is the watchdog's to tell.
    reader, writer = Pipe(duplex=False)
    process = ProcessWatchdog("sampler").launch(serve, (writer,), context="fork")
    if process is not None:
        host, port = reader.recv()
        address[0] = (host, port)
        say(f"sampler: pid {process.pid}, port {port}")
    dist.broadcast_object_list(address)
    if address[0] is None:
        raise RuntimeError("rank 0 has sent no address")
    return address[0]


def main() -> None:
    """Train for `--steps` steps on each rank."""
    parser = argparse.ArgumentParser(description="Data-parallel skip-gram with a sampler process.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--report-every", type=int, default=100, metavar="STEPS")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    say(f"rank {rank}: pid {os.getpid()}, attempt {attempt}")
    loader = DataLoader(NegativeSamplingDataset(start_sampler(), seed=rank), batch_size=None, num_workers=1)

    torch.manual_seed(1)
    nodes = len(Graph(EDGES).names)
    centers, contexts = nn.Embedding(nodes, _DIMENSIONS), nn.Embedding(nodes, _DIMENSIONS)
    parameters = [*centers.parameters(), *contexts.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    for step, (center, context, negatives) in enumerate(itertools.islice(loader, options.steps), start=1):
        vector = centers(center).unsqueeze(1)
        wanted = (vector * contexts(context).unsqueeze(1)).sum(-1)
        unwanted = (vector * contexts(negatives)).sum(-1)
        loss = -(nn.functional.logsigmoid(wanted).sum() + nn.functional.logsigmoid(-unwanted).sum()) / _BATCH
        optimizer.zero_grad()
        loss.backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        if rank == 0 and step % options.report_every == 0:
            say(f"step {step:5}  loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
