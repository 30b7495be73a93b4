"""How kernels are compiled: one decorator for device-like functions, one for the entry that Python calls."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba.core import cgutils, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import intrinsic

from cgdr_numba.core.cache import enable_cache
from cgdr_numba.core.threads import has_threads, run_threads

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

    A kernel of its own would be optimised once more, with all that it calls, for each kernel around it.
    """
    return numba.njit(inline="always", **_PART)(function)  # type: ignore[no-any-return]


class Compiled:
    """A kernel that Python calls, with exactly one compiled signature, compiled at its first call.

    One signature means that no stride pattern, byte alignment or dtype of a user's array compiles anything again.
    """

    def __init__(
        self, function: Callable[..., Any], argument_types: Callable[[], tuple[Any, ...]], **options: bool
    ) -> None:
        """Take the kernel, a function that gives the numba types of its arguments, and further options of njit."""
        self._argument_types = argument_types
        self._lock = threading.Lock()
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
                enable_cache(self._call)
                begin = time.perf_counter()
                self._call.compile(self._argument_types())
                self._call.disable_compile()
                self.compile_seconds = time.perf_counter() - begin
                self.loaded = bool(self._call.stats.cache_hits)
                self._ready = True

    def address(self) -> int:
        """Return where the machine code begins, for `call_at`; 0 where kernels are plain Python."""
        self.compile()
        if self._is_plain:
            return 0
        (result,) = self._call.overloads.values()
        return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))

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


@intrinsic  # type: ignore[untyped-decorator]
def call_at(_typing_context: Any, address: Any, _b: Any, arguments: Any) -> Any:
    """Call the kernel at an address with (b, *arguments).

    Its code stays out of the caller's, which LLVM would otherwise optimise once more at every level of a parallel
    loop, for half a minute in all.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = (types.int64, *signature.args[2].types)
        kernel_type = context.call_conv.get_function_type(types.none, kinds)
        target = builder.inttoptr(values[0], kernel_type.as_pointer())
        given = [values[1], *cgutils.unpack_tuple(builder, values[2])]
        status, _ = context.call_conv.call_function(builder, target, types.none, kinds, given)
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(address, types.int64, arguments), generate


class Entry:
    """A kernel of one bin, and the parallel loop that runs it for every bin.

    A single bin is called without the loop, as waking threads would cost more than a small call; so are all bins, one
    after another, where a process can have no threads.
    """

    def __init__(
        self,
        run_bin: Callable[..., None],
        walk: Callable[..., None],
        argument_types: Callable[[], tuple[Any, ...]],
    ) -> None:
        """Take run_bin(b, *arguments), walk(address, n_bins, *arguments) and the numba types of the arguments."""
        self._bin = Compiled(run_bin, lambda: (types.int64, *argument_types()), _nrt=False)
        self._walk = Compiled(walk, lambda: (types.int64, types.int64, *argument_types()), parallel=True)
        self._address = 0
        self.__doc__ = run_bin.__doc__

    @property
    def compile_seconds(self) -> float | None:
        """Seconds that compiling or loading took in this process; None before the first call and without JIT."""
        parts = [part.compile_seconds for part in (self._bin, self._walk) if part.compile_seconds is not None]
        return sum(parts) if parts else None

    @property
    def loaded(self) -> bool:
        """Whether all compiled code came from the cache on disk."""
        return all(part.loaded for part in (self._bin, self._walk) if part.compile_seconds is not None)

    def compile(self) -> None:
        """Compile now, if that has not happened yet."""
        self._address = self._bin.address()
        if has_threads():
            self._walk.compile()

    def __call__(self, n_bins: int, *arguments: Any) -> None:
        """Run all bins; they write into the last arguments."""
        if n_bins > 1 and has_threads():
            if not self._address:
                self.compile()
            run_threads(self._walk, self._address, n_bins, *arguments)
            return
        for b in range(n_bins):
            self._bin(b, *arguments)
