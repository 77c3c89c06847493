"""Flower's quickstart-pytorch in fedbraid: ten clients with IID CIFAR-10, all of them in each of three rounds.

python examples/peers/flower_quickstart.py [rounds]
"""

import sys

import torch
from torch import nn

import fedbraid as fb


def net():
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
task = fb.tasks.load("cifar10", clients=10, model=net, test_fraction=0.2)
result = fb.simulate(
    task,
    fb.fedavg(),
    fb.Work(lr=0.1, epochs=1, batch=32, momentum=0.9),
    fb.rounds(rounds, clients=10),
    evaluate_on="clients",
)
print(result)
torch.save(result.model().state_dict(), "final_model.pt")
