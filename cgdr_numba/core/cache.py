"""Compiled kernels on disk, keyed by every source file of the package, numba, its settings and the processor.

numba's own key is the file of the function alone: after an edit of a kernel that it calls it would load old machine
code. Its index files, which name data files by numbers, are lost or crossed when processes write them at once. Here a
hash over all that code is made from names a folder, and in it every kernel is one file, written whole and checked by
its own hash: what is damaged counts as missing, and is written anew.
"""

import functools
import hashlib
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding
import numba
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

FOLDER_VARIABLE = "CGDR_NUMBA_CACHE_DIR"
"""Environment variable that names another folder; an empty value turns the cache off."""


_SETTINGS = (
    "OPT",
    "BOUNDSCHECK",
    "LOOP_VECTORIZE",
    "SLP_VECTORIZE",
    "FULL_TRACEBACKS",
    "DEBUGINFO_DEFAULT",
    "CPU_NAME",
    "CPU_FEATURES",
)
"""numba's settings that change machine code."""
_HASH_BYTES = hashlib.sha256().digest_size


def _hash_of_sources() -> str:
    """Return a hash over the package's source files as they are now."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


_SOURCES = _hash_of_sources()
"""Taken with the import: a file that is edited between import and first call is not what will be compiled."""


@functools.cache
def sources_hash() -> str:
    """Return a hash over all that machine code is made from."""
    settings = {name: repr(getattr(numba.config, name, None)) for name in _SETTINGS}
    processor = (llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten())
    facts = (_SOURCES, sys.implementation.cache_tag, numba.__version__, llvmlite.__version__, settings, processor)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def cache_folder() -> Path | None:
    """Return where compiled kernels are kept; None where the cache is turned off, or there is no home folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen is not None:
        return Path(chosen) / sources_hash() if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "cgdr_numba" / sources_hash()
    except RuntimeError:
        return None


class Maker(NamedTuple):
    """What a kernel was made of that was not written as a function in a file."""

    function: Callable[..., Any]
    """The written function that it runs."""
    facts: str
    """What else its machine code depends on, its signature apart."""


class _KernelCache:
    """One kernel's compiled code on disk, as numba's dispatchers ask for it."""

    def __init__(self, folder: Path, function: Any, made_of: Maker | None) -> None:
        """Take the folder, the Python function, and what it was made of where it was not written."""
        self._folder, self._function = folder, function
        self._code = function.__code__.co_code
        if made_of is not None:
            self._code += made_of.function.__code__.co_code + made_of.facts.encode()

    @property
    def cache_path(self) -> str:
        """The folder, as numba's statistics show it."""
        return str(self._folder)

    def _path(self, signature: Any) -> Path:
        """Return the file of one signature."""
        function = self._function
        digest = hashlib.sha256(repr(signature).encode() + self._code).hexdigest()[:16]
        return self._folder / f"{function.__module__}.{function.__qualname__}-{digest}.nbc"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the stored code; None where there is none, or none that is whole."""
        target_context.refresh()
        try:
            stored = self._path(signature).read_bytes()
            begin, code = stored[:_HASH_BYTES], stored[_HASH_BYTES:]
            if hashlib.sha256(code).digest() != begin:
                return None
            return CompileResult._rebuild(target_context, *pickle.loads(code))  # noqa: S301
        except Exception:
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Store compiled code; where that cannot be done, warn once in the process, and go on."""
        if result.library.has_dynamic_globals:
            return
        try:
            code = dumps(result._reduce())
            self._folder.mkdir(parents=True, exist_ok=True)
            _write_whole(self._path(signature), hashlib.sha256(code).digest() + code)
        except Exception as reason:
            _warn_once(f"in {self._folder} ({getattr(reason, 'strerror', None) or reason})")


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file in such a way that other processes see all of it or nothing, however many write it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@functools.cache
def _warn_once(where: str) -> None:
    """Warn that compiled code cannot be kept; `functools.cache` makes it once for a place."""
    warnings.warn(
        f"cgdr_numba: no compiled code can be kept {where}, so every process compiles; "
        f"set {FOLDER_VARIABLE} to a writable folder, or to nothing to compile without this warning",
        RuntimeWarning,
        stacklevel=2,
    )


def enable_cache(dispatcher: Any, made_of: Maker | None = None) -> None:
    """Give a dispatcher our cache; where there is no place for one, warn once and compile in every process.

    A function with a closure is never kept: another one of the same name and code may hold other kernels.
    """
    written = dispatcher.py_func if made_of is None else made_of.function
    if written.__closure__ is not None:
        return
    folder = cache_folder()
    if folder is not None:
        dispatcher._cache = _KernelCache(folder, dispatcher.py_func, made_of)
    elif os.environ.get(FOLDER_VARIABLE) is None:
        _warn_once("without a home folder")
