"""A model is one vector: `Layout` maps its named tensors to their offsets."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor, nn

from fedbraid.core.check import one_of
from fedbraid.errors import ConfigError, DataError

SERVER_MOVES = (
    "fedbraid_moves"  # where a module names the buffers that no client changes, and the server does
)
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Slot:
    """One named tensor's slice of the vector: a layer, for codecs and optimizers that work per layer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    buffer: bool = False  # a running statistic: averaged, never stepped by a gradient
    personal: bool = False  # stays with its client

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class Layout:
    """Names, shapes and offsets of a model's tensors in one flat float32 vector.

    Tied parameters appear once, frozen ones (`requires_grad=False`) not at all.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.size, [s.name for s in layout]
    (8, ['weight', 'bias'])
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, module: nn.Module, buffers: str = "refuse", personal: Sequence[str] = ()) -> Layout:
        """The layout of a module; `buffers="average"` includes running statistics in the vector.

        Tensors whose names match a glob in `personal` come last, and with `buffers="personal"` all that belongs to
        layers with running statistics.
        """
        one_of("buffers", buffers, ("refuse", "average", "personal"))
        named = [(n, p, False) for n, p in module.named_parameters() if p.requires_grad]
        personal_names = {n for n, _, _ in named if any(fnmatchcase(n, glob) for glob in personal)}
        for path, owner in module.named_modules():
            for name, b in owner.named_buffers(recurse=False):
                if not b.is_floating_point() or not _moves(owner, name):
                    continue
                full = f"{path}.{name}".lstrip(".")
                if name in getattr(owner, SERVER_MOVES, ()):
                    named.append((full, b, True))
                    continue
                if getattr(owner, "momentum", 0.1) is None:
                    raise DataError(
                        f"{type(owner).__name__} at {path!r} has momentum=None and counts its batches, which cannot be"
                        " averaged; give it a momentum such as 0.1"
                    )
                if any(fnmatchcase(full, glob) for glob in personal):
                    personal_names.add(full)
                elif buffers == "personal":
                    personal_names |= {
                        full,
                        *(f"{path}.{n}".lstrip(".") for n, _ in owner.named_parameters(recurse=False)),
                    }
                elif buffers == "refuse":
                    raise DataError(
                        f"model has {type(owner).__name__} at {path!r}, whose running statistics are not"
                        ' averaged; use GroupNorm or buffers="average"'
                    )
                named.append((full, b, True))
        for name, p, _ in named:
            if not p.is_floating_point():
                raise DataError(f"parameter {name!r} is {p.dtype}; fedbraid trains floating-point parameters")
        if not named:
            raise DataError(
                "the model has no trainable parameter; set requires_grad=True on what is to be trained"
            )
        _check_personal(personal, [n for n, _, _ in named], personal_names)
        named.sort(key=lambda row: (row[0] in personal_names, row[2] != (row[0] in personal_names)))
        return cls.from_shapes([(n, tuple(p.shape), b, n in personal_names) for n, p, b in named])

    @classmethod
    def from_shapes(
        cls,
        shapes: Sequence[
            tuple[str, tuple[int, ...]]
            | tuple[str, tuple[int, ...], bool]
            | tuple[str, tuple[int, ...], bool, bool]
        ],
    ) -> Layout:
        """A layout from rows of name and shape, and whether it is a buffer, and personal, in order."""
        slots, offset = [], 0
        for name, shape, *rest in shapes:
            slots.append(Slot(str(name), tuple(shape), offset, *map(bool, rest)))
            offset = slots[-1].end
        return cls(tuple(slots))

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    @cached_property
    def size(self) -> int:
        return self.slots[-1].end if self.slots else 0

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.slots)

    @cached_property
    def buffers(self) -> slice | None:
        """Where the vector holds running statistics, if any: after the other shared slots, before the other personal ones."""
        slots = [s for s in self.slots if s.buffer]
        return slice(slots[0].offset, slots[-1].end) if slots else None

    @cached_property
    def shared(self) -> Layout:
        """The slots that travel."""
        return Layout(tuple(s for s in self.slots if not s.personal))

    @cached_property
    def fingerprint(self) -> bytes:
        """Eight bytes that differ between models whose names or shapes differ."""
        text = ";".join(f"{s.name}:{'x'.join(map(str, s.shape))}" for s in self.slots)
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    def flatten(self, module: nn.Module) -> Tensor:
        """The module's tensors as one new float32 vector."""
        named = self._tensors(module)
        return torch.cat([named[s.name].detach().reshape(-1).to(torch.float32) for s in self.slots])

    def views(self, x: Tensor) -> dict[str, Tensor]:
        """Named views of a vector `[..., d]`, each `[..., *shape]`, sharing its memory."""
        if x.shape[-1] != self.size:
            raise ConfigError(f"a vector of {x.shape[-1]} numbers does not fit a layout of {self.size}")
        lead = x.shape[:-1]
        return {s.name: x[..., s.offset : s.end].view((*lead, *s.shape)) for s in self.slots}

    def load(self, module: nn.Module, x: Tensor) -> nn.Module:
        """Copy a vector into the module's tensors, and return the module."""
        named = self._tensors(module)
        with torch.no_grad():
            for name, v in self.views(x).items():
                named[name].copy_(v)
        return module

    def _tensors(self, module: nn.Module) -> dict[str, Tensor]:
        named: dict[str, Tensor] = dict(module.named_buffers())
        named.update(module.named_parameters())
        missing = [s.name for s in self.slots if s.name not in named or named[s.name].shape != s.shape]
        if missing:
            raise ConfigError(
                f"the module does not fit the layout: {missing[0]!r} is missing or has another shape"
            )
        return named


def _check_personal(globs: Sequence[str], names: list[str], personal_names: set[str]) -> None:
    for glob in globs:
        if not any(fnmatchcase(n, glob) for n in names):
            raise ConfigError(
                f"personal={glob!r} matches no trained parameter; the model has {', '.join(names[:6])}"
                f"{', …' if len(names) > 6 else ''}"
            )
    if personal_names.issuperset(names):
        raise ConfigError("all parameters are personal, so that nothing would travel; let some be shared")


def _moves(owner: nn.Module, name: str) -> bool:
    """Whether a forward pass in training mode changes this buffer, or the server does."""
    statistic = isinstance(owner, _NORMS) and name in ("running_mean", "running_var")
    return statistic or name in getattr(owner, SERVER_MOVES, ())
