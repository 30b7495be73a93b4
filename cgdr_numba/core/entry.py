"""From Python into a kernel: its arguments are put into one block of memory, and it runs on the block for every bin."""

import functools
import threading
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import numba
import numpy as np
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.core.types.containers import BaseTuple
from numba.extending import intrinsic
from numpy.typing import NDArray

from cgdr_numba.core.cache import Maker
from cgdr_numba.core.jit import Compiled, kernel, spliced_kernel
from cgdr_numba.core.ragged import Sequences
from cgdr_numba.core.threads import has_threads, run_threads

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])

INTEGERS: Final[Any] = types.Array(types.int64, 1, "C")
"""Arrays that the package makes itself."""
ITEMS: Final[Any] = types.Array(types.int64, 2, "C")
"""Work items, a row each."""


def tuple_type(kinds: tuple[Any, ...]) -> Any:
    """Return the numba type of a named tuple of values whose types `kinds` names."""
    return BaseTuple.from_types(tuple(kinds), type(kinds))


SEQUENCES: Final[Any] = tuple_type(Sequences(INTEGERS, INTEGERS, INTEGERS))
"""Where sequences lie."""
ARENAS: Final[Any] = types.Array(types.float32, 2, "C")
"""Scratch, a row for each bin."""


def caller_array(dtype: Any, n_axes: int, *, readonly: bool = True) -> Any:
    """Return the type of arrays that callers give: any strides and alignment."""
    return types.Array(dtype, n_axes, "A", readonly=readonly, aligned=False)


@intrinsic  # type: ignore[untyped-decorator]
def call_at(_typing_context: Any, address: Any, arguments: Any) -> Any:
    """Call the kernel at an address with a tuple of integers.

    Its code stays out of the caller's, which LLVM would otherwise optimise once more at every level of a parallel
    loop, for half a minute in all.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = tuple(signature.args[1].types)
        kernel_type = context.call_conv.get_function_type(types.none, kinds)
        target = builder.inttoptr(values[0], kernel_type.as_pointer())
        given = cgutils.unpack_tuple(builder, values[1])
        status, _ = context.call_conv.call_function(builder, target, types.none, kinds, given)
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(address, arguments), generate


@intrinsic  # type: ignore[untyped-decorator]
def _on_stack(_typing_context: Any, arguments: Any) -> Any:
    """Return the address of a copy of a tuple that lives as long as the function that asks."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, values[0]), cgutils.intp_t)

    return types.int64(arguments), generate


@intrinsic  # type: ignore[untyped-decorator]
def _put_at(_typing_context: Any, block: Any, arguments: Any) -> Any:
    """Copy a tuple to the address `block`."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        builder.store(values[1], builder.inttoptr(values[0], values[1].type.as_pointer()))
        return context.get_dummy_value()

    return types.void(block, arguments), generate


def _reader_of(kind: Any) -> Any:
    """Return an intrinsic that reads a tuple of the numba type `kind` at an address."""

    @intrinsic  # type: ignore[untyped-decorator]
    def arguments_at(_typing_context: Any, block: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return builder.load(builder.inttoptr(values[0], context.get_value_type(kind).as_pointer()))

        return kind(block), generate

    return arguments_at


def _mover_of(kind: Any, moving: tuple[str, ...]) -> Any:
    """Return an intrinsic that replaces the addresses of those arrays in a tuple of the numba type `kind`."""

    @intrinsic  # type: ignore[untyped-decorator]
    def move_to(_typing_context: Any, block: Any, addresses: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            target = builder.inttoptr(values[0], context.get_value_type(kind).as_pointer())
            for name, address in zip(moving, cgutils.unpack_tuple(builder, values[1]), strict=True):
                i = kind.fields.index(name)
                data = context.data_model_manager[kind.types[i]].get_field_position("data")
                place = cgutils.gep_inbounds(builder, target, 0, i, data)
                builder.store(builder.inttoptr(address, place.type.pointee), place)
            return context.get_dummy_value()

        return types.void(block, addresses), generate

    return move_to


def _walk(address: int, n_bins: int, block: int) -> None:
    """Run the kernel at an address for all bins in parallel; what they write is apart."""
    for b in numba.prange(n_bins):
        call_at(address, (np.int64(b), block))


@spliced_kernel
def _run_all(walk: int, address: int, n_bins: int, block: int) -> None:
    """Run the kernel at an address for all bins on a block: by the loop at `walk`, or one after another."""
    if walk:
        call_at(walk, (address, n_bins, block))
    else:
        for b in range(n_bins):
            call_at(address, (np.int64(b), block))


parallel_loop = Compiled(_walk, lambda: (types.int64,) * 3, parallel=True)
"""The loop over bins of all entries."""

# numba converts arrays to the one compiled signature outside of tuples only, so functions that take them have a
# parameter for each field.
_SOURCE = """
def run(b, block):
    run_bin(b, arguments_at(block))

def launch(walk, address, n_bins, {fields}):
    run_all(walk, address, n_bins, on_stack(Arguments({fields})))

def keep(block, {fields}):
    put_at(block, Arguments({fields}))

def relaunch(walk, address, n_bins, block, {moving}):
    move_to(block, ({moving}))
    run_all(walk, address, n_bins, block)
"""


def _on_bins(launch: Any, address: int, n_bins: int, arguments: tuple[Any, ...]) -> None:
    """Run the kernel at an address for all bins on what `launch` takes, in parallel where there are threads."""
    if n_bins > 1 and has_threads():
        run_threads(launch, parallel_loop.address(), address, n_bins, *arguments)
    else:
        launch(0, address, n_bins, *arguments)


class Entry(Generic[Arguments]):
    """A kernel of one bin, and how Python runs it for every bin.

    A single bin is called without a parallel loop, as waking threads would cost more than a small call; so are all
    bins, one after another, where a process can have no threads.
    """

    def __init__(
        self,
        run_bin: Callable[[int, Arguments], None],
        argument_types: Callable[[], Arguments],
        moving: tuple[str, ...] = (),
        is_spliced: bool = True,
    ) -> None:
        """Take run_bin(b, arguments) and a function that gives the numba types of the arguments by their names.

        Arguments that are kept for several calls may have the arrays `moving` elsewhere in each. `is_spliced` saves
        half a second of compiling, and costs a decode step 2 % of its time.
        """
        self._decorate = spliced_kernel if is_spliced else kernel
        self._run_bin, self._argument_types, self._moving = run_bin, argument_types, moving
        self._is_plain = bool(numba.config.DISABLE_JIT)
        self._lock = threading.Lock()
        self._address, self._launch = 0, None
        self.__doc__ = run_bin.__doc__

    @functools.cached_property
    def _kinds(self) -> Arguments:
        """The numba types of the arguments."""
        return self._argument_types()

    @functools.cached_property
    def _parts(self) -> dict[str, Compiled]:
        """The functions that are compiled, of `_SOURCE`."""
        kinds, run_bin, moving = self._kinds, self._run_bin, self._moving
        names: dict[str, Any] = {
            "__name__": run_bin.__module__,
            "run_bin": self._decorate(run_bin),
            "arguments_at": _reader_of(tuple_type(kinds)),
            "move_to": _mover_of(tuple_type(kinds), moving),
            "Arguments": type(kinds),
            "on_stack": _on_stack,
            "put_at": _put_at,
            "run_all": _run_all,
        }
        fields = ", ".join(type(kinds)._fields)  # type: ignore[attr-defined]
        exec(_SOURCE.format(fields=fields, moving="".join(f"{name}, " for name in moving)), names)  # noqa: S102
        integer = types.int64
        signatures = {
            "run": (integer,) * 2,
            "launch": (*(integer,) * 3, *kinds),
            "keep": (integer, *kinds),
            "relaunch": (integer,) * (4 + len(moving)),
        }
        maker = Maker(run_bin, repr((kinds, moving)))
        for part in signatures:
            names[part].__qualname__ = f"{run_bin.__qualname__}.{part}"
        return {
            part: Compiled(names[part], functools.partial(tuple, signature), maker, _nrt=False)
            for part, signature in signatures.items()
        }

    @property
    def kept_as(self) -> str:
        """Pattern of the file on disk of the kernel of a bin, which is nearly all that compiling takes time for."""
        return f"{self._run_bin.__module__}.{self._run_bin.__qualname__}.run-*.nbc"

    @property
    def compile_seconds(self) -> float | None:
        """Seconds that compiling or loading took in this process; None before the first call and without JIT."""
        ready = [part.compile_seconds for part in self._used() if part.compile_seconds is not None]
        return sum(ready) if ready else None

    @property
    def loaded(self) -> bool:
        """Whether all compiled code came from the cache on disk."""
        return all(part.loaded for part in self._used() if part.compile_seconds is not None)

    def _used(self) -> list[Compiled]:
        """This entry's own functions."""
        return [] if self._is_plain else list(self._parts.values())

    def compile(self, *, with_kept: bool = False) -> None:
        """Compile now what calls take, and with_kept what kept arguments take, if that has not happened yet."""
        with self._lock:
            if not self._is_plain and not self._address:
                self._launch = self._parts["launch"].dispatcher()
                self._address = self._parts["run"].address()
            if not self._is_plain and self._moving and with_kept:
                self._parts["keep"].compile()
                self._parts["relaunch"].compile()
        if has_threads():
            parallel_loop.compile()

    def __call__(self, n_bins: int, arguments: Arguments) -> None:
        """Run all bins; they write into the last arguments."""
        if self._is_plain:
            # Plain NumPy scalars warn where compiled code does not.
            with np.errstate(all="ignore"):
                for b in range(n_bins):
                    self._run_bin(b, arguments)
            return
        if not self._address:
            self.compile()
        _on_bins(self._launch, self._address, n_bins, arguments)

    def keep(self, arguments: Arguments) -> "Kept | None":
        """Return the arguments kept for calls that give the addresses of the moving arrays; None without JIT."""
        if self._is_plain:
            return None
        self.compile()
        context = cpu_target.target_context
        size = context.get_abi_sizeof(context.get_value_type(tuple_type(self._kinds)))
        memory = np.zeros(-(-size // 8), np.int64)
        self._parts["keep"](memory.ctypes.data, *arguments)
        fields = zip(type(arguments)._fields, arguments, strict=True)  # type: ignore[attr-defined]
        owners = tuple(value for name, value in fields if name not in self._moving)
        return Kept(self._parts["relaunch"], self._address, memory, owners)


class Kept:
    """Arguments of an entry in a block of memory that stays, for calls in which only the moving arrays lie elsewhere.

    Calls give the addresses of these arrays' first elements, and answer for them.
    """

    def __init__(self, launch: Compiled, address: int, memory: NDArray[np.int64], owners: tuple[Any, ...]) -> None:
        """Take what launches a block, the address of the kernel, the block's memory, and what lies in its arrays."""
        self._launch, self._address, self._block = launch.dispatcher(), address, memory.ctypes.data
        self._owners = (memory, owners)
        # Integers need no dispatcher, which would look for the signature once more.
        (compiled,) = self._launch.overloads.values()
        self._direct = compiled.entry_point

    def __call__(self, n_bins: int, addresses: tuple[int, ...]) -> None:
        """Run all bins, in parallel where there are threads."""
        _on_bins(self._launch, self._address, n_bins, (self._block, *addresses))

    def in_turn(self, n_bins: int) -> Callable[..., None]:
        """Return what runs the bins one after another, given the addresses, and looks at nothing else on its way."""
        launch = functools.partial(self._direct, 0, self._address, n_bins, self._block)
        # What the block points to has to last as long as what is returned.
        vars(launch)["owners"] = self._owners
        return launch
