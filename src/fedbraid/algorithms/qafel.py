"""QAFeL: buffered asynchronous training, quantized both ways (Algorithms 1 and 2 of its paper).

Algorithm 1, the server, holds the model x and the hidden state x̂, which every client holds too:

    for each upload Q_c(Δ_i) that arrives: add s(τ_i) Q_c(Δ_i) to the buffer        gather=Mean(weights, Staleness)
    when it has K of them:  x ← x − lr · (1/K) Σ s(τ_i) Q_c(Δ_i)                    server=buffered_steps
                            q ← Q_s(x − x̂); broadcast q; x̂ ← x̂ + q                  down=HiddenState(Q_s)

Algorithm 2, a client: y ← x̂; K local SGD steps on y; upload Q_c(x̂ − y)             up=PlainUplink(Q_c)
"""

from __future__ import annotations

import logging

from fedbraid.algorithms._build import BUFFER, PLAIN, SERVER_RATE, builder, searched
from fedbraid.algorithms.asynchronous import buffered_steps
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.codec import Codec
from fedbraid.core.context import Staleness
from fedbraid.core.gather import Mean
from fedbraid.links import codecs
from fedbraid.links.hidden_state import HiddenState
from fedbraid.links.plain import PlainUplink

log = logging.getLogger("fedbraid")


@builder
@searched(lr=SERVER_RATE, schedule={"buffer": BUFFER})
def qafel(
    lr: float = 1.0, momentum: float = 0.0, staleness: str = "sqrt", up: Codec | None = None, down: Codec | None = None,
    weights: str = "uniform",
) -> Algorithm:  # fmt: skip
    """QAFeL: FedBuff quantized both ways, the broadcast through a hidden state x̂ (4-bit qsgd by default).

    x ← x − lr · (1/K) Σ s(τ_i) Q_c(Δ_i);  q = Q_s(x − x̂);  x̂ ← x̂ + q on both sides

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.qafel(lr=0.5)
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.buffered(20, buffer=4, concurrency=8))
    >>> result.last("accuracy") > 0.5
    True
    """
    up, down = up or codecs.qsgd(4), down or codecs.qsgd(4)
    if not up.unbiased:
        log.warning(
            "QAFeL's proof wants an unbiased client codec (Algorithm 2, line 5), which %r is not; qsgd(bits) is",
            up,
        )
    gather = Mean(weights, Staleness(staleness))
    return Algorithm(
        gather=gather,  # Algorithm 1: Δ̄ ← Δ̄ + s(τ) Q_c(Δ), for K uploads
        server=buffered_steps(lr, momentum),  # Algorithm 1: x^{t+1} ← x^t − η_g Δ̄/K
        up=PlainUplink(up),  # Algorithm 2, line 5: Δ ← Q_c(y_0 − y_P)
        down=HiddenState(down),  # Algorithms 1 and 3: q ← Q_s(x^{t+1} − x̂^t), x̂^{t+1} ← x̂^t + q
        work=PLAIN,  # Algorithm 2, lines 1 to 4: P plain steps from y_0 = x̂^t
    )
