"""What a part is, as data: everything that others ask of a rule, gather or transform besides its mathematics.

Each record is made by a part's `traits()`. `merge` is the only place where the traits of several parts become one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from fedbraid.core.codec import Codec
from fedbraid.core.context import ClientContext, Vectors
from fedbraid.core.layout import Layout
from fedbraid.errors import ConfigError

LocalLoop = Callable[[Any, Any, ClientContext], Any]  # (module, batches, ctx) -> the mean loss

# How `merge` reads a field: true if one part says so, true if all parts say so, answered by one part at most.
ANY, ALL, ONE = {"merge": "any"}, {"merge": "all"}, {"merge": "one"}


@dataclass(frozen=True)
class ExamplePrivacy:
    """Gradients of single examples are clipped to `clip`, and their sum gets noise of deviation z·clip."""

    clip: float
    z: float

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on a sum."""
        return self.z * self.clip


@dataclass(frozen=True)
class PersonalTraining:
    """How clients train and use models that differ from the server's.

    `initial_model(ctx)` and `personal_model(client_state)` return `[m, d]` (or `[1, d]`). `head_steps(K)` returns how
    many of its K steps each client gives to its personal parameters, `[m, 1]`; the others train the shared ones.
    """

    initial_model: Callable[[ClientContext], Tensor] | None = field(
        default=None, metadata=ONE
    )  # where clients start
    personal_model: Callable[[Vectors], Tensor] | None = field(
        default=None, metadata=ONE
    )  # which models they use
    head_steps: Callable[[Tensor], Tensor] | None = field(
        default=None, metadata=ONE
    )  # steps for personal parameters
    has_no_global_model: bool = field(default=False, metadata=ANY)  # the server's model is used by no client
    requires_personal_parameters: bool = field(default=False, metadata=ANY)  # the task must name some


@dataclass(frozen=True)
class RuleTraits:
    """What a rule is. A chain has the merged traits of its rules."""

    requires_sgd: bool = field(
        default=False, metadata=ANY
    )  # it reads gradients off the length of local training
    decays_client_state: bool = field(
        default=False, metadata=ANY
    )  # client state changes with every server step
    personal: PersonalTraining | None = field(
        default=None, metadata=ONE
    )  # clients' models differ from the server's
    example_privacy: ExamplePrivacy | None = field(
        default=None, metadata=ONE
    )  # it clips and noises gradients
    local_loop: LocalLoop | None = field(default=None, metadata=ONE)  # it replaces the local steps
    flips_labels: Callable[[Any], Any] | None = field(default=None, metadata=ONE)  # of these clients, of ids
    defined_for_async: bool = field(default=False, metadata=ALL)  # a paper defines it for stale updates


def _accept(layout: Layout) -> None:
    """Every model will do."""


def _any_cohort(clients: int) -> None:
    """Every cohort will do."""


@dataclass(frozen=True)
class MemoryStep:
    """What one server step did to the memory of every client's last vector y_j, whether the server or clients hold it."""

    change: Tensor  # Σ_S s(τ_i) p_i (v_i − y_i) / Σ_S p_i, of what was received
    weight: float  # Σ_S p_i
    before: Tensor  # Σ w_j y_j as the step began
    after: Tensor  # the same once y_i ← v_i, of what is stored
    seen: float  # Σ w_j after the step, over the clients seen so far
    population: float  # Σ_N p_j


@dataclass(frozen=True)
class MemoryFormula:
    """The update that an algorithm makes of its memory."""

    per_rate: ClassVar[bool] = False  # v_i is Δ_i/η, not Δ_i
    averages_stored: ClassVar[bool] = False  # it is a mean of the stored vectors
    defined_for_async: ClassVar[bool] = False  # with uniform weights a paper defines it for stale updates

    def update(self, m: MemoryStep, lr: float) -> Tensor:
        """G, of a cohort that trained with this rate on average."""
        raise NotImplementedError


@dataclass(frozen=True)
class UpdateMemory:
    """A formula over differences, and the codec through which the server stores what they are taken from."""

    formula: MemoryFormula
    codec: Codec | None = None


@dataclass(frozen=True)
class GatherTraits:
    """What a gather is."""

    weights: str = "uniform"  # how it weighs clients, by "samples" or "uniform"
    is_weighted_mean: bool = False  # it averages every vector by name, and does nothing else
    sums_only: bool = False  # it is given sums of uploads, and no single one
    needs_every_upload: bool = True  # False: `add` reads neither state nor x, so workers fold and `merge`
    requires_updates: bool = False  # `delta` must be each client's x − y
    steps_when_empty: bool = False  # a step without uploads makes an update all the same
    planned_cohort: float | None = None  # divide by this, not by the number of uploads
    quantized_fraction: float | None = None  # of the planned cohort, where that is not counted
    check_layout: Callable[[Layout], None] = _accept  # refuses models that it cannot gather
    check_cohort: Callable[[int], None] = _any_cohort  # refuses cohorts of too few clients
    memory: UpdateMemory | None = None  # it averages differences from every client's last update
    counts_clients_once: bool = False  # |S| is the number of clients, however often each uploads
    drops_nonfinite: bool = False  # uploads that are not finite do not reach the model
    defined_for_async: bool = False  # a paper defines it for stale updates


@dataclass(frozen=True)
class TransformTraits:
    """What a transform is. A pipeline has the merged traits of its transforms."""

    requires_sgd: bool = field(
        default=False, metadata=ANY
    )  # it reads gradients off the length of local training
    averages_client_memory: bool = field(
        default=False, metadata=ANY
    )  # its update is a mean of stored vectors
    needs_server_data: bool = field(default=False, metadata=ANY)  # `ctx.server_data` is bound
    defined_for_async: bool = field(default=False, metadata=ALL)  # a paper defines it for stale updates


T = TypeVar("T")


def merge(kind: type[T], traits: Sequence[T], parts: Sequence[object]) -> T:
    """The traits of several parts as one; two parts that answer a question which has one answer are refused."""
    return kind(**{f.name: _merged(f, [getattr(t, f.name) for t in traits], parts) for f in fields(kind)})  # type: ignore[arg-type]


def _merged(f: Any, values: list[Any], parts: Sequence[object]) -> Any:
    match f.metadata["merge"]:
        case "any":
            return any(values)
        case "all":
            return all(values)
    given = [(value, part) for value, part in zip(values, parts, strict=True) if value is not None]
    if len(given) < 2:
        return given[0][0] if given else None
    if isinstance(given[0][0], PersonalTraining):
        return merge(PersonalTraining, [value for value, _ in given], [part for _, part in given])
    (_, first), (_, second) = given[:2]
    raise ConfigError(
        f"{first!r} and {second!r} both define the {f.name.replace('_', ' ')} of one algorithm; use one of them"
    )
