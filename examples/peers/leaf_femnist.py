"""LEAF's FEMNIST script in fedbraid: writers as clients, 3 of them in each round, one epoch of FedAvg.

python examples/peers/leaf_femnist.py [rounds]
"""

import sys

from torch import nn

import fedbraid as fb


def cnn():
    model = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 7 * 7, 2048), nn.ReLU(), nn.Linear(2048, 62),
    )  # fmt: skip
    for weight in model.parameters():  # as TensorFlow starts
        nn.init.xavier_uniform_(weight) if weight.ndim > 1 else nn.init.zeros_(weight)
    return model


rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
result = fb.simulate(
    fb.tasks.load("femnist", model=cnn, statistics="leaf"),
    fb.fedavg(),
    fb.Work(lr=0.004, epochs=1, batch=10),
    fb.rounds(rounds, clients=3),
    evaluate_every=20,
    evaluate_on="clients",
)
print(result)
