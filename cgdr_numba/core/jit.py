"""How kernels are compiled: one decorator for device-like functions, one class for those that Python calls."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from cgdr_numba.core.cache import Maker, enable_cache

F = TypeVar("F", bound=Callable[..., Any])

_STRICT: dict[str, Any] = {
    "nogil": True,
    # NumPy's division by zero gives inf, Python's an exception that a kernel could not raise.
    "error_model": "numpy",
    # No contraction, no reassociation: every rounding of the golden and faithful paths is part of their contract.
    "fastmath": False,
}


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Code that is optimised where it ends up, in the kernel that Python calls.

    By default LLVM optimises every kernel together with all that it calls, so the innermost ones once for each level
    around them: 7 of 23 seconds of a first prefill and decode.
    """

    def _optimize_final_module(self) -> None:
        """Leave the code as it is."""


class _PartCompiler(Compiler):  # type: ignore[misc]
    """numba's compiler, which puts a kernel's code into a `_PartLibrary`."""

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, *others: Any) -> None:
        """Take what numba's compiler takes."""
        if library is None:
            library = _PartLibrary(targetctx.codegen(), "part")
            library.enable_object_caching()
        super().__init__(typingctx, targetctx, library, *others)


_PART: dict[str, Any] = {"_nrt": False, "pipeline_class": _PartCompiler, **_STRICT}


def kernel(function: F) -> F:
    """Compile `function` strictly, at its first use; with NUMBA_DISABLE_JIT=1 it stays plain Python.

    Kernels allocate nothing and count no references: counting cost more than a small head's whole work. So what a
    kernel returns, where that is a view, is for other kernels alone; from Python it would come without an owner.
    """
    return numba.njit(**_PART)(function)  # type: ignore[no-any-return]


def inlined_kernel(function: F) -> F:
    """Compile as `kernel` does, into its callers, so that a loop over its calls can become vector code."""
    return numba.njit(forceinline=True, **_PART)(function)  # type: ignore[no-any-return]


def spliced_kernel(function: F) -> F:
    """Compile as `kernel` does, as a part of its caller: for what one kernel calls in one place.

    A kernel of its own takes its arguments once more through numba: half a second to compile where these are all of a
    call's.
    """
    return numba.njit(inline="always", **_PART)(function)  # type: ignore[no-any-return]


class Compiled:
    """A kernel that Python calls, with exactly one compiled signature, compiled at its first call.

    One signature means that no stride pattern, byte alignment or dtype of a user's array compiles anything again.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        argument_types: Callable[[], tuple[Any, ...]],
        made_of: Maker | None = None,
        **options: bool,
    ) -> None:
        """Take the kernel, a function that gives the numba types of its arguments, and further options of njit.

        A kernel that was made, and not written, is known on disk by what it was `made_of`.
        """
        self._argument_types, self._made_of = argument_types, made_of
        self._lock, self._address = threading.Lock(), 0
        self._is_plain = self._ready = bool(numba.config.DISABLE_JIT)
        self._call = numba.njit(**options, **_STRICT)(function)
        self.compile_seconds: float | None = None
        """Seconds that compiling or loading took in this process; None before the first call and without JIT."""
        self.loaded = False
        """Whether the compiled code came from the cache on disk."""
        self.__doc__ = function.__doc__

    def compile(self) -> None:
        """Compile now, if that has not happened yet."""
        with self._lock:
            if not self._ready:
                enable_cache(self._call, self._made_of)
                begin = time.perf_counter()
                self._call.compile(self._argument_types())
                self._call.disable_compile()
                self.compile_seconds = time.perf_counter() - begin
                self.loaded = bool(self._call.stats.cache_hits)
                self._ready = True

    def dispatcher(self) -> Any:
        """Return what Python calls when the kernel is compiled, which it is then."""
        self.compile()
        return self._call

    def address(self) -> int:
        """Return where the machine code begins, for calls from other kernels."""
        if not self._address:
            self.compile()
            (result,) = self._call.overloads.values()
            self._address = int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))
        return self._address

    def __call__(self, *arguments: Any) -> None:
        """Run the kernel; it returns nothing and writes into its last arguments."""
        if self._is_plain:
            # Plain NumPy scalars warn where compiled code does not.
            with np.errstate(all="ignore"):
                self._call(*arguments)
            return
        if not self._ready:
            self.compile()
        self._call(*arguments)
