"""Compile a source once, keep the library in the user's cache, load it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from fedbraid_native.errors import CompileError

ARM = ("arm64", "aarch64")


def tuned_for(machine: str) -> str:
    """The flag by which a compiler uses this processor's own instructions; Apple's clang has the second alone on ARM."""
    return "-mcpu=native" if machine in ARM else "-march=native"


FLAGS = (
    "-std=c++17",
    "-O3",
    tuned_for(platform.machine()),
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
)


def compiler() -> list[str] | None:
    """The C++ compiler's command: $CXX, or else the first of g++, c++ and clang++ on PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for words in [chosen] if chosen else [["g++"], ["c++"], ["clang++"]]:
        if os.name == "posix" and (path := shutil.which(words[0])):
            return [path, *words[1:]]
    return None


def lanes() -> int:
    """Samples to a vector: 16 with AVX-512, but 8 on AMD before Zen 5, whose units are half as wide."""
    model, instructions = cpu_model()
    halves = "AMD" in model and int(_processor().get("cpu family", 0)) < _ZEN_5
    return 16 if "avx512f" in instructions.split() and not halves else 8


@lru_cache(maxsize=8)
def version(command: tuple[str, ...]) -> str:
    """What a compiler calls itself."""
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompileError(f"the compiler {command[0]} does not run: {error}") from error
    return done.stdout.partition("\n")[0]


_ZEN_5 = 26  # AMD's number of the family


@lru_cache(maxsize=1)
def _processor() -> dict[str, str]:
    """What Linux says of the first core, nothing elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_model() -> tuple[str, str]:
    """The processor's name and its instruction sets, which a library built for it depends on."""
    facts = _processor()
    if not facts:
        return platform.processor() or platform.machine(), ""
    return facts.get("model name", platform.machine()), facts.get("flags", facts.get("Features", ""))


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/fedbraid or ~/.cache/fedbraid: made private, refused if others could write to it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache") / "fedbraid"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise CompileError(f"the cache folder {folder} cannot be used: {error.strerror}") from error
    if found.st_uid != os.getuid():
        raise CompileError(
            f"the cache folder {folder} belongs to another user; remove it or set XDG_CACHE_HOME"
        )
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise CompileError(
            f"others can write to the cache folder {folder}; run: chmod 700 {shlex.quote(str(folder))}"
        )
    return folder


def _cores() -> int:
    """The cores that this process may use; where the system does not say (macOS), all that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _path(command: list[str], flags: tuple[str, ...], source: str) -> Path:
    parts = (source, *flags, *command, version(tuple(command)), *cpu_model())
    key = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
    return cache_folder() / f"{key}.so"


def is_compiled(source: str, flags: tuple[str, ...] = FLAGS) -> bool:
    """Whether `library` would find this source in the cache."""
    command = compiler()
    return command is not None and _is_intact(_path(command, flags, source))


def library(source: str, flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """The library of this source, from the cache or compiled now."""
    command = compiler()
    if command is None:
        raise CompileError("no C++ compiler was found; install g++ or set CXX")
    path = _path(command, flags, source)
    for last in (False, True):
        if last or not _is_intact(path):
            try:
                _compile(command, flags, source, path)
            except OSError as error:
                raise CompileError(
                    f"the library cannot be written to {path.parent}: {error.strerror}"
                ) from error
        try:
            return ctypes.CDLL(str(path))  # CDLL, not PyDLL: calls release the interpreter's lock
        except OSError as error:
            path.unlink(missing_ok=True)
            if last:
                raise CompileError(f"the compiled library does not load: {error}") from error
    raise AssertionError


def _is_intact(path: Path) -> bool:
    """Whether the library is there, this user's, writable by nobody else, and of the bytes that were compiled."""
    try:
        return _ours(path) and path.with_suffix(".sum").read_text() == _checksum(path)
    except (OSError, UnicodeDecodeError):
        return False


def _checksum(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _ours(path: Path) -> bool:
    """Whether the library is there, this user's, and writable by nobody else."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _compile(command: list[str], flags: tuple[str, ...], source: str, path: Path) -> None:
    """A source that says so is compiled in pieces, at the same time."""
    found = re.search(r"^#define PARTS (\d+)$", source, re.MULTILINE)
    parts = int(found[1]) if found else 1
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        cpp, so = Path(folder, "model.cpp"), Path(folder, "model.so")
        cpp.write_text(source, encoding="utf-8")
        pieces = [str(cpp)]
        if parts > 1:
            alone = [*command, *(flag for flag in flags if flag != "-shared"), "-c", str(cpp)]
            pieces = [str(Path(folder, f"{k}.o")) for k in range(parts)]
            with ThreadPoolExecutor(_cores()) as hands:
                each = [hands.submit(_run, [*alone, f"-DPART={k}", "-o", o]) for k, o in enumerate(pieces)]
            for piece in each:
                piece.result()
        _run([*command, *flags, *pieces, "-o", str(so)])
        if not so.exists():
            raise CompileError(f"{command[0]} made no library")
        so.chmod(0o700)
        (checksum := Path(folder, "model.sum")).write_text(_checksum(so))
        os.replace(so, path)
        os.replace(checksum, path.with_suffix(".sum"))


def _run(words: list[str]) -> None:
    """Have a compiler do this, or say what it said."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise CompileError(f"the compiler {words[0]} does not run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        said = lines[0].strip() if lines else "it said nothing"
        raise CompileError(f"{words[0]} failed with exit code {done.returncode}: {said}")
