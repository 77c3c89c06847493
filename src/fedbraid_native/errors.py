"""The two ways in which compiling ends without code."""

from __future__ import annotations


class Unsupported(Exception):
    """Why a model cannot be compiled, as one sentence."""


class CompileError(Exception):
    """Why supported code cannot be compiled or loaded on this machine, as one sentence."""
