"""Do the campaigns of benchmarks/ (power cuts, bit flips, bad input) find nothing, in their quick versions?"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def benchmark(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def traces():
    return (
        shutil.which("strace")
        and not subprocess.run(["strace", "-o", "/dev/null", "true"], check=False).returncode
    )


@pytest.mark.skipif(not traces(), reason="strace is not here, or may not trace")
def test_power_cuts():
    assert sum(benchmark("powercut").campaign(15).values()) == 15


def test_a_disk_keeps_what_was_synced_and_any_part_of_the_rest(tmp_path):
    powercut = benchmark("powercut")
    log = powercut.Log("/r").read(
        '1 mkdir("\\x2f\\x72", 0700) = 0\n'
        '1 openat(AT_FDCWD, "\\x2f\\x72\\x2f\\x61", O_RDWR|O_CREAT, 0600) = 3\n'
        '1 write(3, "\\x61\\x62", 2) = 2\n'
        "1 fsync(3) = 0\n"
        '1 openat(AT_FDCWD, "\\x2f\\x72", O_RDONLY) = 4\n'
        "1 fsync(4) = 0\n"
        '1 openat(AT_FDCWD, "\\x2f", O_RDONLY) = 5\n'
        "1 fsync(5) = 0\n"
        '1 pwrite64(3, "\\x63\\x64", 2, 2 <unfinished ...>\n'
        "2 fsync(9) = 0\n"
        "1 <... pwrite64 resumed>) = 2\n"
        "1 ftruncate(3, 1) = 0\n"
    )
    kinds = [op.kind for op in log.ops]
    assert kinds == ["folder", "make", "write", "sync", "sync", "sync", "write", "truncate"]
    ends = {powercut.cut(log, 7, powercut.random.Random(k))[0]["/r/a"] for k in range(60)}
    assert {b"ab", b"abcd", b"a"} <= ends <= {b"ab", b"abcd", b"a", b"ab\0\0"}  # the last: a length alone
    early = [powercut.cut(log, 3, powercut.random.Random(k))[0] for k in range(60)]
    assert {} in early
    assert {"/r/a": b""} in early
    assert {"/r/a": b"ab"} in early


def test_bit_flips():
    seen = benchmark("bitflip").campaign(40)
    assert not any(outcomes["elsewhere"] for outcomes in seen.values())
    assert seen["run.json"]["refused"] == seen["model.safetensors"]["refused"] == 8
    assert seen["metrics.jsonl"]["the same bits"] == 8


def test_bad_input():
    seen, bad = benchmark("fuzz_cli").campaign(120)
    assert not bad, "\n".join(bad)
    assert seen["exit 2"] > 60
