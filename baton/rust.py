"""Errors of libraries in Rust: a panic is not an `Exception`, so error handlers would miss it."""

from __future__ import annotations


def complaint_of(error: BaseException) -> str:
    """Return a library's error as text. Raises the error again if it is neither an `Exception` nor a panic."""
    if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
        raise error
    return f"{type(error).__name__}: {error}"[:1000]
