"""FedNova beside the optimizer of its own authors, after every round.

git clone https://github.com/JYWa/FedNova && python benchmarks/authors/fednova.py FedNova

Every client is one of their processes, here a thread: what their optimizer sends through torch.distributed is summed
between threads. Nobody is left out of a round, as in their code. Clients take 2 to 12 steps.
"""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import torch
from beside import ROUNDS, UNEQUAL, Verdict, clients, clone, flat, network, ours

import fedbraid as fb

clone(__doc__.splitlines()[0])
vars(sys.modules["torch.optim.optimizer"]).setdefault(
    "required", None
)  # PyTorch's mark of "no default", once


def once(name: str) -> None:
    """In-place sums took the factor first when the authors wrote."""
    now = getattr(torch.Tensor, name)

    def either(self, first, *rest, **named):
        return now(self, rest[0], alpha=first) if rest else now(self, first, **named)

    setattr(torch.Tensor, name, either)


once("add_")
torch.Tensor.cuda = lambda self, *_: self
import distoptim  # noqa: E402

module = sys.modules["distoptim.FedNova"]
LR, N, BATCH = 0.1, len(UNEQUAL), 2


class Sum:
    """An all_reduce between threads, added up in the order of the clients."""

    def __init__(self) -> None:
        self.barrier, self.mine, self.given = threading.Barrier(N), threading.local(), [None] * N

    def __call__(self, tensor: torch.Tensor, op: object = None) -> None:
        self.given[self.mine.rank] = tensor.clone()
        self.barrier.wait()
        tensor.copy_(sum(self.given[1:], self.given[0]))
        self.barrier.wait()


def theirs(data: list, momentum: float) -> list:
    total, seen, failures = Sum(), [], []

    def client(rank: int) -> None:
        try:
            total.mine.rank = rank
            net, (x, y) = nets[rank], (torch.tensor(v) for v in data[rank])
            ratio = len(y) / sum(UNEQUAL)
            optimizer = distoptim.FedNova(net.parameters(), ratio=ratio, gmf=0, lr=LR, momentum=momentum)
            for _ in range(ROUNDS):
                for at in range(0, len(y), BATCH):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(net(x[at : at + BATCH]), y[at : at + BATCH]).backward()
                    optimizer.step()
                optimizer.average()
                if rank == 0:
                    seen.append(flat(net.parameters()).copy())
        except Exception as error:
            failures.append(error)
            total.barrier.abort()

    nets = [network() for _ in range(N)]
    module.dist = SimpleNamespace(all_reduce=total, ReduceOp=SimpleNamespace(SUM=None))
    threads = [threading.Thread(target=client, args=(rank,)) for rank in range(N)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return seen


verdict, data, everyone = Verdict(1e-5), clients(UNEQUAL), [list(range(N))] * ROUNDS
for momentum in 0.0, 0.9:
    work = fb.Work(lr=LR, epochs=1, batch=BATCH, shuffle=False, momentum=momentum)
    their = theirs(data, momentum)
    verdict.compare(f"fednova, momentum {momentum}", ours(fb.fednova(), data, work, everyone), their)
    verdict.compare("control: fedavg", ours(fb.fedavg(), data, work, everyone), their, control=True)
verdict.close()
