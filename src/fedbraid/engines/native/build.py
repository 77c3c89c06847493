"""Compile a source once, keep the library in the user's cache, load it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from fedbraid.errors import EngineError

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
)


class NativeUnavailable(EngineError):
    """This model cannot run natively here; another backend can."""


def compiler() -> list[str] | None:
    """The C++ compiler's command: $CXX, or else the first of g++, c++ and clang++ on PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for words in [chosen] if chosen else [["g++"], ["c++"], ["clang++"]]:
        if os.name == "posix" and (path := shutil.which(words[0])):
            return [path, *words[1:]]
    return None


def lanes() -> int:
    """Samples to a vector: 16 with AVX-512, but 8 on AMD, where it was as fast and pads less."""
    model, instructions = cpu_model()
    return 16 if "avx512f" in instructions.split() and "AMD" not in model else 8


@lru_cache(maxsize=8)
def version(command: tuple[str, ...]) -> str:
    """What a compiler calls itself."""
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"the compiler {command[0]} does not run: {error}") from error
    return done.stdout.partition("\n")[0]


@lru_cache(maxsize=1)
def cpu_model() -> tuple[str, str]:
    """The processor's name and its instruction sets, which a library built for it depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine(), ""
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    return facts.get("model name", platform.machine()), facts.get("flags", facts.get("Features", ""))


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/fedbraid or ~/.cache/fedbraid: made private, refused if others could write to it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache") / "fedbraid"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise NativeUnavailable(f"the cache folder {folder} cannot be used: {error.strerror}") from error
    if found.st_uid != os.getuid():
        raise NativeUnavailable(
            f"the cache folder {folder} belongs to another user; remove it or set XDG_CACHE_HOME"
        )
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise NativeUnavailable(
            f"others can write to the cache folder {folder}; run: chmod 700 {shlex.quote(str(folder))}"
        )
    return folder


def built(source: str, flags: tuple[str, ...] = FLAGS) -> bool:
    """Whether the library of this source is in the cache."""
    command = compiler()
    return command is not None and _ours(_path(command, flags, source))


def _path(command: list[str], flags: tuple[str, ...], source: str) -> Path:
    parts = (source, *flags, *command, version(tuple(command)), *cpu_model())
    key = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
    return cache_folder() / f"{key}.so"


def library(source: str, flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """The library of this source, from the cache or compiled now."""
    command = compiler()
    if command is None:
        raise NativeUnavailable("no C++ compiler was found; install g++ or set CXX")
    path = _path(command, flags, source)
    if not _ours(path):
        _compile(command, flags, source, path)
    try:
        return ctypes.CDLL(str(path))  # CDLL, not PyDLL: calls release the interpreter's lock
    except OSError as error:
        path.unlink(missing_ok=True)
        raise NativeUnavailable(f"the compiled library does not load: {error}") from error


def _ours(path: Path) -> bool:
    """Whether the library is there, this user's, and writable by nobody else."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _compile(command: list[str], flags: tuple[str, ...], source: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        cpp, so = Path(folder, "model.cpp"), Path(folder, "model.so")
        cpp.write_text(source, encoding="utf-8")
        try:
            done = subprocess.run(
                [*command, *flags, str(cpp), "-o", str(so)],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise NativeUnavailable(f"the compiler {command[0]} does not run: {error}") from error
        if done.returncode or not so.exists():
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            said = lines[0].strip() if lines else "it said nothing"
            raise NativeUnavailable(f"{command[0]} failed with exit code {done.returncode}: {said}")
        so.chmod(0o700)
        os.replace(so, path)
