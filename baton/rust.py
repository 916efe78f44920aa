"""What libraries in Rust raise: a panic of one is no `Exception`, and would pass by whatever handles errors."""

from __future__ import annotations


def complaint_of(error: BaseException) -> str:
    """Returns what a library complains of. Raises the error again if it is neither an `Exception` nor a panic."""
    if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
        raise error
    return f"{type(error).__name__}: {error}"[:1000]
