"""pfl-research's CIFAR-10 benchmark in fedbraid: IID, 1,000 users of 50 images, 50 of them in each iteration.

python examples/peers/pfl_cifar10.py [iterations]
"""

import sys

from torch import nn

import fedbraid as fb


def simple_cnn():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return model


rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
task = fb.tasks.load("cifar10", clients=1000, model=simple_cnn)
result = fb.simulate(
    task,
    fb.fedavg(weights="uniform"),
    fb.Work(lr=0.1, epochs=1, batch=10),
    fb.rounds(rounds, clients=50),
    evaluate_every=10,
)
print(result)
