"""How fast codecs are, as ratios measured side by side in one run on one thread, and how small.

python benchmarks/codecs.py             all but scikit-learn's minutes at 8 bits
python benchmarks/codecs.py --all       with them
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedbraid.core.codec import Codec
from fedbraid.core.layout import Layout
from fedbraid.links import _bitpacking as _bits
from fedbraid.links import _elias_fano as positions
from fedbraid.links import codecs

# FedShift's CNN: 2,155,872 weights, no biases
LAYOUT = Layout.from_shapes(
    [
        ("conv1.weight", (32, 3, 5, 5)),
        ("conv2.weight", (64, 32, 5, 5)),
        ("fc1.weight", (512, 4096)),
        ("fc2.weight", (10, 512)),
    ]
)
COPIES = 4


def interleaved(jobs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The median seconds of each job, the jobs taking turns so that a busy machine slows all alike."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(t[1:])) for name, t in times.items()}


def arithmetic(v: torch.Tensor, repeats: int) -> list[dict[str, Any]]:
    """Encode + decode of the codecs that compute, against copying the vector four times."""
    into = torch.empty_like(v)
    made: list[Codec] = [
        codecs.int8(),
        codecs.int4(),
        codecs.uniform(8),
        codecs.uniform(4),
        codecs.uniform(5),
    ]
    made += [codecs.qsgd(8), codecs.qsgd(4), codecs.qsgd(4, norm="l2", bucket=512), codecs.fp16()]
    jobs: dict[str, Callable[[], Any]] = {
        "new copies": lambda: [v.clone() for _ in range(COPIES)],
        "copies in place": lambda: [into.copy_(v) for _ in range(COPIES)],
    }
    for codec in made:
        jobs[repr(codec)] = lambda codec=codec: codec.decode(codec.encode(v, LAYOUT, 1), LAYOUT)  # type: ignore[misc]
    t = interleaved(jobs, repeats)
    return [
        {
            "codec": repr(codec),
            "ms": 1e3 * t[repr(codec)],
            "x four new copies": t[repr(codec)] / t["new copies"],
            "x four copies in place": t[repr(codec)] / t["copies in place"],
            "bits a weight": 8 * len(codec.encode(v, LAYOUT)) / LAYOUT.size,
        }
        for codec in made
    ]


def sparse(v: torch.Tensor, repeats: int) -> dict[str, Any]:
    """topk's encode against torch.topk with its indices packed plainly."""
    codec, width = codecs.topk(0.01), (LAYOUT.size - 1).bit_length()
    k = codec.count(LAYOUT)

    def plain() -> list[Any]:
        at = torch.topk(v.abs(), k).indices
        halves = at.numpy().astype(np.int64)
        low = _bits.pack((halves & 0x7FF).astype(np.uint16)[None], 11)
        return [v[at].numpy().tobytes(), low, _bits.pack((halves >> 11).astype(np.uint16)[None], width - 11)]

    t = interleaved({"ours": lambda: codec.encode(v, LAYOUT), "plain": plain}, repeats)
    return {
        "codec": repr(codec),
        "ms": 1e3 * t["ours"],
        "x torch.topk + packing": t["ours"] / t["plain"],
        "bits a position": 8 * positions.size(k, LAYOUT.size) / k,
        "bits a position, plain": width,
        "bits a position, entropy": LAYOUT.size * entropy(0.01) / k,
    }


def entropy(p: float) -> float:
    return float(-p * np.log2(p) - (1 - p) * np.log2(1 - p))


def clusters(v: torch.Tensor, bits: int, repeats: int) -> dict[str, Any]:
    """kmeans' encode against scikit-learn's fit of the weights, layer by layer."""
    from sklearn.cluster import KMeans

    codec = codecs.kmeans(bits)
    layers = [v[s.offset : s.end].numpy() for s in LAYOUT if len(s.shape) > 1]
    ours = interleaved({"ours": lambda: codec.encode(v, LAYOUT)}, repeats)["ours"]
    start = time.perf_counter()
    inertia = sum(KMeans(1 << bits, n_init=1, random_state=0).fit(w[:, None]).inertia_ for w in layers)
    theirs = time.perf_counter() - start
    error = float(((codec.decode(codec.encode(v, LAYOUT), LAYOUT) - v).double() ** 2).sum())
    return {
        "codec": repr(codec),
        "ms": 1e3 * ours,
        "scikit-learn ms": 1e3 * theirs,
        "times faster": theirs / ours,
        "squared error / scikit-learn's": error / inertia,
        "bits a weight": 8 * len(codec.encode(v, LAYOUT)) / LAYOUT.size,
    }


def show(row: dict[str, Any]) -> str:
    return ", ".join(v if isinstance(v, str) else f"{k} {v:.3g}" for k, v in row.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="with scikit-learn at 8 bits")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    v = 0.05 * torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(0))
    rows = arithmetic(v, args.repeats)
    rows.append(sparse(v, args.repeats))
    rows += [clusters(v, bits, 5) for bits in ((4, 8) if args.all else (4,))]
    print(json.dumps(rows, indent=2) if args.json else "\n".join(show(row) for row in rows))


if __name__ == "__main__":
    main()
