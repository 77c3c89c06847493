"""Thin links over any algorithm: FedPAQ (Reisizadeh et al. 2020), Fed-EF (Li and Li 2023), hidden states."""

from __future__ import annotations

from dataclasses import replace

from fedbraid.algorithms._build import builder, searched
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.codec import Codec
from fedbraid.core.gather import Mean
from fedbraid.core.search_space import Categorical
from fedbraid.core.transform import Scale, pipeline
from fedbraid.errors import ConfigError
from fedbraid.links.error_feedback import ErrorFeedback
from fedbraid.links.hidden_state import HiddenState
from fedbraid.links.plain import PlainUplink


@builder
@searched(up=Categorical(("qsgd(4)", "qsgd(8)")), down=Categorical(("qsgd(4)", "qsgd(8)")))
def with_codecs(
    a: Algorithm, up: Codec | None = None, down: Codec | None = None, only: tuple[str, ...] | None = None
) -> Algorithm:
    """Any algorithm over other links; what wraps a link stays.

    up: Δ_i ← Q_up(Δ_i) on both sides;  down: x ← Q_down(x), which clients train from

    With `only` the up codec encodes the uploads of these names, and the others travel exactly: FedShift's authors
    quantise SCAFFOLD's weights and send its Δc as it is.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.with_codecs(fb.scaffold(), up=fb.codecs.qsgd(4))
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.75
    True
    >>> fb.with_codecs(fb.scaffold(), up=fb.codecs.uniform(4), only=("delta",)).name
    "with_codecs(scaffold(), up=uniform(bits=4), only=('delta',))"
    """
    if only is not None and up is None:
        raise ConfigError(f"only={only} selects what the up codec encodes, and up= is missing; give up=")
    only = (only,) if isinstance(only, str) else only if only is None else tuple(only)
    new_up = a.up if up is None else a.up.over(up, only)
    return replace(a, up=new_up, down=a.down if down is None else a.down.over(down), name="")


@builder
def error_feedback(a: Algorithm) -> Algorithm:
    """Any algorithm whose clients add what the codec lost to their next upload.

    send Q(u + e_i);  e_i ← u + e_i − Q(u + e_i)

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.error_feedback(fb.fedpaq(fb.codecs.int4()))
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.45
    True
    """
    return replace(a, up=ErrorFeedback(a.up.codec, only=a.up.only), name="")


@builder
def hidden_state(a: Algorithm) -> Algorithm:
    """Any algorithm whose server and clients share a hidden state x̂, so that only its change is broadcast.

    q = Q_s(x − x̂);  x̂ ← x̂ + q on both sides;  clients train from x̂

    Q_s is the down codec, which must be contractive.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.hidden_state(fb.with_codecs(fb.fedavg(), down=fb.codecs.qsgd(4)))
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.45
    True
    """
    return replace(a, down=HiddenState(a.down.codec), name="")


@builder
@searched(codec=Categorical(("qsgd(2)", "qsgd(4)", "qsgd(8)")))
def fedpaq(codec: Codec, lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """FedPAQ (Reisizadeh et al. 2020): FedAvg with quantized uploads.

    x ← x − lr · Σ_S p_i Q(Δ_i)

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.fedpaq(fb.codecs.qsgd(4))
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.45
    True
    """
    return Algorithm(gather=Mean(weights), server=pipeline(Scale(lr)), up=PlainUplink(codec))


@builder
@searched(codec=Categorical(("int4()", "topk(0.01)", "topk(0.1)")))
def fedef(codec: Codec, lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """Fed-EF (Li and Li 2023): FedAvg with quantized uploads and error feedback.

    send Q(Δ_i + e_i);  e_i ← Δ_i + e_i − Q(Δ_i + e_i);  x ← x − lr · Σ_S p_i Q(Δ_i + e_i)

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.fedef(fb.codecs.topk(0.1))
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.4
    True
    """
    return Algorithm(gather=Mean(weights), server=pipeline(Scale(lr)), up=ErrorFeedback(codec))
