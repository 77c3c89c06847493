"""Differential privacy of whole clients: what each uploads is clipped, and noise goes on the sum, or on every upload.

Noise on the sum is McMahan et al. 2018, a clip that follows the median norm Andrew et al. 2021. That of single examples
inside a client is DP-SGD (Abadi et al. 2016) in its local steps. The parts are in `privacy/`.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import number
from fedbraid.core.context import ClientContext, Vectors
from fedbraid.core.gather import Gather, Mean
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Rule, chain
from fedbraid.core.transform import Transform, pipeline
from fedbraid.core.vector_spec import Upload
from fedbraid.errors import ConfigError, unknown
from fedbraid.links.secure import Scales, SecureUplink
from fedbraid.privacy.clipping import Clipped, ClippedBefore, LocalNoise, PrivateUplink, SkellamNoise, scaled
from fedbraid.privacy.parts import START, HiddenExamples, Noised, SentClip, hiding, of_mean, uniform

log = logging.getLogger("fedbraid")

Clip = float | str


@builder
def private(
    a: Algorithm,
    clip: Clip = 1.0,
    noise: float | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    where: str = "server",
    scales: Mapping[str, float] | None = None,
    unit: str = "client",
) -> Algorithm:
    """Any algorithm with (ε, δ)-differential privacy of whole clients, or of single examples inside them.

    Σ_S v_i·min(1, C/‖v_i‖) + N(0, (zC)² I), divided by the planned cohort, C being `clip` and z `noise`

    Every client's uploads are clipped to norm `clip`, or to one that follows the median norm ("adaptive"). Gaussian
    noise of deviation noise·clip goes on their sum, or with where="client" on each upload before it leaves; with
    where="distributed", over secure, each client adds a share of it in whole numbers (Skellam). Given
    `epsilon` alone, the noise is solved for the whole schedule before anything runs; given both, the run ends before
    the step that would spend more. `scales` says for names that nobody declared by what they are divided to be clipped.

    With unit="example" every client clips the gradient of each of its examples and noises their sum, in every local
    step, whose batch takes each example with probability batch/n; all that leaves it is made of such gradients.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=100)
    >>> private = fb.private(fb.fedavg(), clip=1.0, epsilon=8.0)
    >>> result = fb.simulate(task, private, fb.Work(lr=0.1, batch=10), fb.rounds(2, clients=10))
    >>> 0 < result.last("epsilon") <= 8
    True
    """
    who, own = a.name.split("(")[0] or "this algorithm", _scales(a, scales)
    bound = _check(clip, noise, epsilon, delta, where)
    if isinstance(a.gather, Noised) or isinstance(a.up, PrivateUplink) or hiding(a.rule) is not None:
        raise ConfigError(f"{who} is private already; call private once")
    if unit not in ("client", "example"):
        raise unknown("unit", str(unit), ["client", "example"])
    if unit == "example":
        _check_examples(who, a.rule, clip, where, scales)
        return replace(a, rule=chain(HiddenExamples(bound, noise, epsilon, delta), a.rule), name="")
    uploads = scaled(a.uploads, own)
    _check_uploads(who, uploads)
    if a.gather.traits().weights != "uniform":
        _say_once(
            "private: all clients count alike, because a weight by samples would tell of a client's data"
        )
    rule, server = uniform(a.rule), uniform(a.server)
    later = bool(names := {d.name for d in server.accounts()}) and names <= uploads.keys()
    if not later:
        _check_accounts(who, server, uploads)
    if where == "client":
        _check_own(who, clip, later)
        up = LocalNoise(a.up.codec, a.up, bound, own, noise, epsilon, delta)
        return replace(a, rule=rule, gather=uniform(a.gather), server=server, up=up, name="")
    secure = a.gather.traits().sums_only
    if secure and clip == "adaptive":
        raise ConfigError(
            "clip='adaptive' follows the norms of single clients' uploads, which a secure sum hides; give clip a number"
        )
    if not secure:
        _check_gather(who, a.gather)
    if where == "distributed":
        _check_distributed(who, a, secure)
    assert isinstance(a.gather, Mean)
    if later and a.stateful(Layout.from_shapes([("w", (2, 2))])):
        raise ConfigError(
            f"{who}'s clients remember what they sent, but its server rescales it before it is clipped; use fedavg or feddyn"
        )
    adaptive = clip == "adaptive"
    sums = uniform(a.gather) if secure else Mean("uniform", a.gather.staleness)
    gather = Noised(
        bound, noise, epsilon, delta, a.gather.staleness, adaptive, later, uploads=uploads, server=server, sums=sums,
        by_clients=where == "distributed",
    )  # fmt: skip
    if adaptive:
        server = pipeline(server, SentClip(bound))
    link = Clipped(a.up.codec, a.up, bound, own, adaptive, later)
    if isinstance(a.up, SecureUplink):
        link = (SkellamNoise if where == "distributed" else ClippedBefore)(a.up.codec, a.up, bound, own)
    return replace(a, rule=rule, gather=gather, server=server, up=link, name="")


def _check(clip: Any, noise: float | None, epsilon: float | None, delta: float, where: str) -> float:
    """Refuse numbers that keep nobody's privacy; the clip to start with."""
    if where not in ("server", "client", "distributed"):
        raise unknown("where", str(where), ["server", "client", "distributed"])
    if noise is None and epsilon is None:
        raise ConfigError("private needs noise= (its deviation in clips) or epsilon= (a budget); give one")
    if noise is not None:
        number("noise", noise, "[0, inf)")
    if epsilon is not None:
        number("epsilon", epsilon, "(0, inf)", "is a budget that no noise can keep")
    if noise == 0 and epsilon is not None:
        raise ConfigError(
            f"noise=0 keeps no budget, and epsilon={epsilon} was given; use noise > 0 or leave it out"
        )
    number("delta", delta, "(0, 1)")
    if clip == "adaptive":
        return START
    if isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < math.inf:
        raise ConfigError(
            f"clip={clip!r} bounds nothing or lets nothing through; use a number > 0 or 'adaptive'"
        )
    return float(clip)


def _scales(a: Algorithm, scales: Mapping[str, float] | None) -> Scales:
    """Scales as they are kept, of names that are uploaded."""
    if scales is None:
        return ()
    if not isinstance(scales, Mapping):
        raise ConfigError(
            f"scales={scales!r} says nothing by name; give a dict such as {{{min(a.uploads)!r}: 1.0}}"
        )
    for name, scale in scales.items():
        if name not in a.uploads:
            raise unknown("upload", str(name), a.uploads)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
            raise ConfigError(f"scales[{name!r}]={scale!r} divides by nothing; use a number > 0")
    return tuple(sorted((name, float(scale)) for name, scale in scales.items()))


def _check_uploads(who: str, uploads: Mapping[str, Upload]) -> None:
    for name, what in sorted(uploads.items(), key=lambda item: item[1].signed):
        if not what.signed and what.width is None:
            raise ConfigError(
                f"{who} uploads {name!r}, which is never negative and crosses links as its root, so that a clip does not"
                " bound its sum; use an algorithm that uploads updates alone, such as fedavg or fedadam"
            )
        if what.clip_scale is None:
            raise ConfigError(
                f"{who} uploads {name!r}, whose scale is not declared, so that no clip bounds it; give"
                f" scales={{{name!r}: …}} or use an algorithm that uploads updates alone, such as fedavg or feddyn"
            )


def _check_examples(who: str, rule: Rule, clip: Clip, where: str, scales: Mapping[str, float] | None) -> None:
    """Refuse what would tell of examples beside the noised gradients of local steps."""
    if clip == "adaptive":
        raise ConfigError(
            "clip='adaptive' follows the norms of clients' uploads; give clip a number with unit='example'"
        )
    if where != "server" or scales is not None:
        raise ConfigError(
            "unit='example' noises gradients inside every client, whatever it uploads; leave out where= and scales="
        )
    if rule.traits().local_loop is not None:
        raise ConfigError(
            f"{who} trains by a local loop of the user's own, whose gradients are not clipped; use a rule with unit='example'"
        )
    if gradients_besides(rule):
        raise ConfigError(
            f"{who} takes gradients besides those of its local steps, which would tell of single examples; use an algorithm"
            " that takes one a step, such as fedavg, scaffold or fedgbo"
        )


def gradients_besides(rule: Rule) -> bool:
    """Whether a visit asks for a gradient of the whole local set, or for a second one of a step's batch."""
    asked = []

    def gradient(y: Tensor) -> Tensor:
        asked.append(y)
        return torch.ones(2, 4)

    layout, x, one = Layout.from_shapes([("w", (2, 1)), ("b", (2,))]), torch.zeros(1, 4), torch.ones(2, 1)
    memory = {k: v.reshape(1, -1).repeat(2, 1) for k, v in rule.init(x[0]).items()}
    down: Vectors = defaultdict(lambda: torch.ones(1, 4))
    ctx = ClientContext(x, down, memory, 0.1, one, one, one, 0, layout, gradient, gradient)
    s = rule.start(ctx)
    v, s = rule.step(torch.ones(2, 4), x.repeat(2, 1), s, ctx)
    rule.finish(x - 0.1 * v, s, ctx)
    return bool(asked)


def _check_own(who: str, clip: Clip, rescales: bool) -> None:
    if clip == "adaptive":
        raise ConfigError(
            "clip='adaptive' follows the cohort's norms, which only a trusted server sees; give clip a number with"
            " where='client'"
        )
    if rescales:
        raise ConfigError(
            f"{who}'s server divides by numbers that clients upload, which their own noise may bring to zero; use"
            " where='server' or an algorithm that uploads updates alone"
        )


def _check_distributed(who: str, a: Algorithm, secure: bool) -> None:
    """Refuse noise in shares where single uploads are seen, or where it does not lie on one grid."""
    if not secure:
        raise ConfigError(
            f"where='distributed' gives {who}'s clients a share of the noise each, which hides only their sum; use"
            " private(secure(…), where='distributed')"
        )
    if len(a.uploads) != 1 or len(a.up.codec.grids()) != 1:
        raise ConfigError(
            f"where='distributed' needs one vector on one grid, and {who} uploads {sorted(a.uploads)} over {a.up.codec!r}; use"
            " where='server'"
        )


def _check_gather(who: str, gather: Gather) -> None:
    if not gather.traits().is_weighted_mean:
        raise ConfigError(
            f"{who} gathers by {type(gather).__name__}, which reads single clients' updates, and noise on a sum does not hide"
            " those; use an algorithm that averages, one whose clients remember, such as fedadavr(held='client'), or"
            " where='client'"
        )


def _check_accounts(who: str, server: Transform, uploads: Mapping[str, Upload]) -> None:
    """Refuse server parts that need more of each client than its place in a sum."""
    if any(d.is_mean_samples for d in server.sends()):
        raise ConfigError(
            f"{who}'s server tells clients the mean number of samples of all, which noise on a sum does not hide; use other"
            " weights"
        )
    if not of_mean(server, uploads, with_sent=True):
        raise ConfigError(
            f"{who}'s server accounts for every single client's samples, which noise on a sum does not hide; use one that"
            " needs the mean alone, such as fedavg, feddyn or adabest"
        )


@lru_cache
def _say_once(what: str) -> None:
    log.warning(what)
