"""Does every case of docs/cases.md run as it stands, in at most twenty lines?"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

PAGE = (Path(__file__).parent.parent / "docs/cases.md").read_text()
CASES = dict(re.findall(r"^## (.+?)$.*?```py\n(.*?)```", PAGE, re.S | re.M))


@pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves
@pytest.mark.parametrize("name", CASES)
def test_a_case_runs(name, tmp_path, monkeypatch, capsys):
    code = CASES[name]
    for package in ("peft", "transformers", "datasets"):
        if f"from {package} " in code:
            pytest.importorskip(package, reason="the extra hf is not installed")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "case"}
    exec(compile(code, name, "exec", dont_inherit=True), names)
    assert capsys.readouterr().out.strip()
    assert np.isfinite(names["result"].last("train_loss")) if "result" in names else True


def test_they_are_sixteen_and_short():
    assert len(CASES) == 16
    for name, code in CASES.items():
        assert len([line for line in code.splitlines() if line.strip()]) <= 20, name
