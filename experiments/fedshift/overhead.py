"""Table III, and each quantiser's error, measured here: `python experiments/fedshift/overhead.py` writes overhead.json."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

import fedbraid as fb

PAPER = {"uniform(4)": ("1,052 + 0.25", 10), "kmeans(4)": ("1,052 + 6.19", 179), "uniform(8)": ("2,105 + 0.25", 10), "kmeans(8)": ("2,105 + 88.82", 2172)}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    module = fb.models.build("fedshift_cnn")
    layout = fb.Layout.of(module)
    x = layout.flatten(module)
    rows = []
    for name, (size, milliseconds) in PAPER.items():
        kind, bits = name.rstrip(")").split("(")
        codec = getattr(fb.codecs, kind)(int(bits))
        took = []
        for seed in range(5):
            begun = time.process_time()
            message = codec.encode(x, layout, seed)
            took.append(time.process_time() - begun)
        rows.append(
            {
                "codec": name,
                "bytes": len(message),
                "ms": 1000 * sorted(took)[2],
                "paper_kb": size,
                "paper_ms": milliseconds,
            }
        )
    kinds = {"uniform": {}, "kmeans": {}, "kmeans, 4 iterations": {"iterations": 4}}
    errors = {
        name: {bits: error(name.split(",")[0], bits, options, x, layout) for bits in (4, 6, 8)}
        for name, options in kinds.items()
    }
    text = json.dumps({"codecs": rows, "errors": errors}, indent=2)
    (Path(__file__).parent / "overhead.json").write_text(text + "\n")
    print(text)


def error(kind: str, bits: int, options: dict[str, int], x: torch.Tensor, layout: fb.Layout) -> float:
    """‖x − Q(x)‖²/‖x‖²."""
    codec = getattr(fb.codecs, kind)(bits, **options)
    back = codec.decode(codec.encode(x, layout, 0), layout)
    return float((x - back).norm() ** 2 / x.norm() ** 2)


if __name__ == "__main__":
    main()
