"""What NVFlare runs for benchmarks/peers.py: on the server a persistor that notes the rounds, at the sites the script below."""

import json
import os
import random
import sys
import time

import torch
from nvflare.apis.event_type import EventType
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from peers import counting, workload
from speed import Bare


class Persistor(ModelPersistor):
    """The first model comes from a folder; what was seen and the last model go there."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.seen = {"at": [], "clients": 0, "steps": 0}

    def load_model(self, fl_ctx):
        first = torch.load(os.path.join(self.folder, "first.pt"))
        return make_model_learnable({name: w.numpy() for name, w in first.items()}, {})

    def save_model(self, model, fl_ctx):
        """NVFlare calls it at the end of every round."""
        self.seen["at"].append(time.perf_counter())
        self.weights = model["weights"]

    def handle_event(self, event_type, fl_ctx):
        if event_type == AppEventType.AFTER_AGGREGATION:
            result = fl_ctx.get_prop(AppConstants.AGGREGATION_RESULT)
            self.seen["clients"] += (clients := result.meta["nr_aggregated"])
            self.seen["steps"] += round(clients * result.metrics["steps"])  # the clients' mean
        elif event_type == EventType.END_RUN:
            torch.save(
                {n: torch.as_tensor(w) for n, w in self.weights.items()}, os.path.join(self.folder, "last.pt")
            )
            with open(os.path.join(self.folder, "seen.json"), "w") as file:
                json.dump(self.seen, file)


def main(folder: str, name: str, check: bool) -> None:
    """A site: train one of its clients whenever the server asks."""
    import nvflare.client as flare

    torch.set_num_threads(1)
    x, y = torch.load(os.path.join(folder, "table.pt"), mmap=True)  # one copy for all processes
    work = workload(name, check)
    loop = Bare(work, x, y)
    names = [n for n, _ in loop.model.named_parameters()]
    flare.init()
    site = int(flare.get_site_name().removeprefix("site-")) - 1
    mine = range(site, work.clients, work.cohort)
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        with counting(work.momentum, on=check) as steps:
            trained = loop.client([received.params[n] for n in names], random.choice(mine))
        reply = flare.FLModel(
            params=dict(zip(names, trained)),
            metrics={"steps": steps[0]},
            meta={"NUM_STEPS_CURRENT_ROUND": work.samples},
        )
        flare.send(reply)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "True")
