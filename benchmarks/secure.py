"""Secure aggregation with all its cryptography: one round of LeNet-5, beside Flower's own SecAgg+ workflow.

    python benchmarks/secure.py [--clients 100] [--neighbours 20 99] [--dropped 0 5] [--repeats 3]
    python benchmarks/secure.py round [--clients 1000]

Both sides run every client and the server in this process, without a network, on the same vectors: keys, shares, masked
uploads, unmasking, and the mean in floats in the end. Flower's side is its `SecAggPlusWorkflow` and `secaggplus_mod` as
they are, over a grid that hands messages on. Clients that drop out do so after they have shared their keys. The two take
turns; printed is the least processor time of each.

`round` times a simulated round of so many clients, as `fb.secure` does it.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable

import numpy as np

from fedbraid import models
from fedbraid.core.layout import Layout
from fedbraid.links.shared import Shared
from fedbraid.privacy.secure_sum import SecureClient, SecureServer, Session

SAMPLES = 100  # of every client
LAYOUT = Layout.of(models.lenet5())


def vectors(clients: int) -> np.ndarray:
    """Updates as long as LeNet-5, of every client."""
    return np.random.default_rng(0).normal(0, 0.05, (clients, LAYOUT.size)).astype(np.float32)


def ours(v: np.ndarray, neighbours: int, threshold: int, dropped: int) -> np.ndarray:
    """The mean of those who stayed, weighted by samples."""
    codec, m = Shared(16, 1.0), len(v)
    bits = 16 + (m * SAMPLES - 1).bit_length()
    session = Session(os.urandom(16), m, neighbours, threshold, bits, v.shape[1])
    clients = [SecureClient(session, i + 1) for i in range(m)]
    server = SecureServer(session)
    for c in clients:
        server.receive(c.party, c.keys())
    orders = server.close()
    for c in clients:
        server.receive(c.party, c.shares(orders[c.party]))
    orders = server.close()
    for c in clients[dropped:]:
        codes = codec.to_grid(v[c.party - 1][None], [c.party])[0] * SAMPLES
        server.receive(c.party, c.masked(orders[c.party], codes))
    orders = server.close()
    for c in clients[dropped:]:
        server.receive(c.party, c.unmask(orders[c.party]))
    server.close()
    total = session.signed(server.total()) / ((m - dropped) * SAMPLES)
    mean: np.ndarray = codec.from_grid(total[None])[0]
    return mean


def flowers(v: np.ndarray, neighbours: int, threshold: int, dropped: int) -> np.ndarray:
    """The same by Flower: `num_shares` counts the client itself."""
    from flwr.app import Context, RecordDict
    from flwr.client.mod import secaggplus_mod
    from flwr.common import Code, ConfigRecord, FitRes, Message, Status, ndarrays_to_parameters
    from flwr.common import parameters_to_ndarrays as to_arrays
    from flwr.compat.common import recorddict_compat as compat
    from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
    from flwr.server.client_proxy import ClientProxy
    from flwr.server.strategy import FedAvg
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # messages ask for them

    class Proxy(ClientProxy):
        def __init__(self, node_id: int) -> None:
            super().__init__(str(node_id))
            self.node_id = node_id

        get_properties = get_parameters = fit = evaluate = reconnect = None

    Proxy.__abstractmethods__ = frozenset()
    contexts = {i: Context(0, i, {}, RecordDict(), {}) for i in range(len(v))}

    def fitted(message: Message, context: Context) -> Message:
        mine = ndarrays_to_parameters([v[context.node_id]])
        reply = FitRes(Status(Code.OK, ""), mine, SAMPLES, {})
        return Message(compat.fitres_to_recorddict(reply, keep_input=False), reply_to=message)

    class Grid:
        stage = 0

        def send_and_receive(self, messages, *, timeout=None):
            self.stage += 1
            there = [m for m in messages if self.stage < 3 or m.metadata.dst_node_id >= dropped]
            for m in there:  # one content for all: a network would have copied it
                records = {
                    k: ConfigRecord(dict(v)) if isinstance(v, ConfigRecord) else v
                    for k, v in m.content.items()
                }
                m.content = RecordDict(records)
            return [secaggplus_mod(m, contexts[m.metadata.dst_node_id], fitted) for m in there]

    strategy = FedAvg(fraction_fit=1.0, min_fit_clients=len(v), min_available_clients=len(v))
    manager = SimpleClientManager()
    for i in range(len(v)):
        manager.register(Proxy(i))
    context = LegacyContext(
        Context(0, 0, {}, RecordDict(), {}), ServerConfig(num_rounds=1), strategy, manager
    )
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(
        ndarrays_to_parameters([v[0]]), True
    )
    workflow = SecAggPlusWorkflow(neighbours + 1, threshold, clipping_range=1.0)
    workflow(Grid(), context)
    mean: np.ndarray = to_arrays(
        compat.arrayrecord_to_parameters(context.state.array_records[MAIN_PARAMS_RECORD], True)
    )[0]
    return mean


def least(work: Callable[[], np.ndarray], best: float) -> tuple[float, np.ndarray]:
    began = time.process_time()
    made = work()
    return min(best, time.process_time() - began), made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="?", default="beside", choices=["beside", "round"])
    parser.add_argument("--clients", type=int, default=None)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[20, 99])
    parser.add_argument("--dropped", type=int, nargs="+", default=[0, 5])
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    if asked.what == "round":
        return simulated(asked.clients or 1000)
    v = vectors(asked.clients or 100)
    for side in (ours, flowers):  # what is imported and made once
        side(v[:5], 4, 3, 0)
    print("clients  neighbours  dropped  ours (s)  Flower (s)  times  largest difference of the means")
    for k in asked.neighbours:
        for dropped in asked.dropped:
            beside(v, k, dropped, asked.repeats)
    return None


def beside(v: np.ndarray, k: int, dropped: int, repeats: int) -> None:
    threshold, mine, theirs = k // 2 + 1, np.inf, np.inf
    for _ in range(repeats):
        mine, a = least(lambda: ours(v, k, threshold, dropped), mine)
        theirs, b = least(lambda: flowers(v, k, threshold, dropped), theirs)
    exact = v[dropped:].mean(0)
    apart = " ".join(f"{np.abs(x - exact).max():.1e}" for x in (a, b))
    print(
        f"{len(v):7}  {k:10}  {dropped:7}  {mine:8.2f}  {theirs:10.2f}  {theirs / mine:5.1f}  {apart}",
        flush=True,
    )


def simulated(clients: int) -> None:
    """Two rounds by `fb.simulate`; the second is timed."""
    import torch

    import fedbraid as fb

    model = models.lenet5()
    x, y = torch.randn(clients * 2, 1, 28, 28), torch.randint(0, 10, (clients * 2,))
    data = [(x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2]) for i in range(clients)]
    task = fb.Task.from_arrays(model, clients=data)
    for name, algorithm in {"plain": fb.fedavg(), "secure": fb.secure(fb.fedavg())}.items():
        times: list[float] = []

        class Note:
            def step(self, record: object, run: object, times: list[float] = times) -> None:
                times.append(time.perf_counter())

        work, schedule = fb.Work(lr=0.01, steps=1, batch=2), fb.rounds(3, clients=clients)
        fb.simulate(task, algorithm, work, schedule, evaluate_every=10, callbacks=[Note()])
        print(f"{name}: {times[-1] - times[-2]:.2f} s a round of {clients} clients")


if __name__ == "__main__":
    main()
