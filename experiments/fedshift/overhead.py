"""Table III measured here: `python experiments/fedshift/overhead.py` writes overhead.json, which the page shows."""

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
    (Path(__file__).parent / "overhead.json").write_text(json.dumps(rows, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
