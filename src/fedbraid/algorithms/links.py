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

    With `only` the up codec encodes the uploads of these names, and the others travel exactly: FedShift's authors
    quantise SCAFFOLD's weights and send its Δc as it is.

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
    """Any algorithm whose clients add what the codec lost to their next upload."""
    return replace(a, up=ErrorFeedback(a.up.codec, only=a.up.only), name="")


@builder
def hidden_state(a: Algorithm) -> Algorithm:
    """Any algorithm whose server and clients share a hidden state, so that only its change is broadcast."""
    return replace(a, down=HiddenState(a.down.codec), name="")


@builder
@searched(codec=Categorical(("qsgd(2)", "qsgd(4)", "qsgd(8)")))
def fedpaq(codec: Codec, lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """FedPAQ: FedAvg with quantised uploads."""
    return Algorithm(gather=Mean(weights), server=pipeline(Scale(lr)), up=PlainUplink(codec))


@builder
@searched(codec=Categorical(("int4()", "topk(0.01)", "topk(0.1)")))
def fedef(codec: Codec, lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """Fed-EF: FedAvg with quantised uploads and error feedback."""
    return Algorithm(gather=Mean(weights), server=pipeline(Scale(lr)), up=ErrorFeedback(codec))
