"""Compiled kernels on disk, keyed by every source file of the package.

numba's own key is the file of the function alone: after an edit of a kernel that it calls it would load old machine
code. Here one hash over all sources names the folder, so another version of any of them is another cache.
"""

import functools
import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import llvmlite
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache

FOLDER_VARIABLE = "CGDR_NUMBA_CACHE_DIR"
"""Environment variable that names another folder; an empty value turns the cache off."""


_SETTINGS = ("OPT", "BOUNDSCHECK", "LOOP_VECTORIZE", "SLP_VECTORIZE", "FULL_TRACEBACKS", "DEBUGINFO_DEFAULT")
"""numba's settings that change machine code and that its own key leaves out (the processor is in it)."""


@functools.cache
def sources_hash() -> str:
    """Return a hash over everything that compiled code is made from: sources, numba, llvmlite, numba's settings."""
    settings = {name: repr(getattr(numba.config, name, None)) for name in _SETTINGS}
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {settings}".encode())
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path | None:
    """Return where compiled kernels are kept; None where the cache is turned off."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen is not None:
        return Path(chosen) / sources_hash() if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "cgdr_numba" / sources_hash()
    except RuntimeError:
        return None


class _PackageLocator:
    """Tells numba's cache the folder and the stamp."""

    def __init__(self, folder: Path) -> None:
        """Keep the folder."""
        self._folder = folder

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> Self | None:
        """Return a locator for any function of the package; None where no file can be kept."""
        del function, file
        folder = cache_folder()
        if folder is None:
            return None
        locator = cls(folder)
        try:
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator

    def ensure_cache_path(self) -> None:
        """Make the folder, and raise OSError where files cannot be written there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self._folder, os.W_OK):
            raise PermissionError(self._folder)

    def get_cache_path(self) -> str:
        """Return the folder."""
        return str(self._folder)

    def get_source_stamp(self) -> str:
        """Return what the cached code was made from."""
        return sources_hash()

    def get_disambiguator(self) -> str:
        """Return nothing: names within the package are enough."""
        return "0"


class _PackageCacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    """numba's way to store compile results, at our place."""

    _locator_classes = (_PackageLocator,)


class _PackageCache(FunctionCache):  # type: ignore[misc]
    """numba's cache, which takes an unreadable file for a missing one."""

    _impl_class = _PackageCacheImpl

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the stored code, or None where there is none or it cannot be read."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store compiled code; after a damaged index, start a new one."""
        try:
            super().save_overload(sig, data)
        except Exception:
            self.flush()
            super().save_overload(sig, data)


def enable_cache(dispatcher: Any) -> None:
    """Give a dispatcher our cache; where none can be written, warn once and compile in every process."""
    if cache_folder() is None:
        return
    try:
        dispatcher._cache = _PackageCache(dispatcher.py_func)
    except RuntimeError:
        warnings.warn(
            f"cgdr_numba: no compiled code can be kept in {cache_folder()}; set {FOLDER_VARIABLE} to a writable folder",
            RuntimeWarning,
            stacklevel=2,
        )
