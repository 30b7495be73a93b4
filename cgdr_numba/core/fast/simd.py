"""Vector code by hand: the instruction set that kernels are compiled for, and the pieces that emit LLVM vectors.

numba's own vectoriser neither keeps a register tile in registers nor may it reorder a sum, so the loops that matter
are written as LLVM vectors. Nothing here computes by itself; `microkernel` and `row_passes` put the pieces together,
each with a twin in plain NumPy for runs without JIT.
"""

import functools
from dataclasses import dataclass
from typing import Any, Final

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

FLOAT: Final = ir.FloatType()
INDEX: Final = ir.IntType(64)
SMALL: Final = ir.IntType(32)

_PROBE = """
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
define void @probe(<16 x float>* %p) #0 {
  %x = load <16 x float>, <16 x float>* %p, align 4
  %y = call <16 x float> @llvm.fma.v16f32(<16 x float> %x, <16 x float> %x, <16 x float> %x)
  store <16 x float> %y, <16 x float>* %p, align 4
  ret void
}
attributes #0 = { "prefer-vector-width"="512" "min-legal-vector-width"="512" }
"""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What kernels may count on."""

    name: str
    lanes: int
    """float32 lanes of a vector register."""
    has_fma: bool
    """Whether a x + y with one rounding is an instruction; without it products are rounded by themselves."""
    n_registers: int
    """Vector registers."""


AVX512: Final = InstructionSet("avx512", 16, True, 32)
AVX2: Final = InstructionSet("avx2", 8, True, 16)
NEON: Final = InstructionSet("neon", 4, True, 32)
GENERIC: Final = InstructionSet("generic", 4, False, 16)


@functools.cache
def instruction_set() -> InstructionSet:
    """Return the instruction set of numba's target, as the code that LLVM makes of a wide fma shows it."""
    machine = cpu_target.target_context.codegen()._tm
    return instruction_set_of(machine)


def instruction_set_of(machine: llvm.TargetMachine) -> InstructionSet:
    """Return the instruction set of a target machine."""
    module = llvm.parse_assembly(f'target triple = "{machine.triple}"\n' + _PROBE)
    code = machine.emit_assembly(module)
    if "zmm" in code:
        return AVX512
    if "vfmadd" in code and "ymm" in code:
        return AVX2
    if "fmla" in code:
        return NEON
    return GENERIC


class Lanes:
    """Emits operations on vectors of `n` float32 lanes into an LLVM function under construction."""

    def __init__(self, builder: Any, n: int) -> None:
        self.builder, self.n = builder, n
        self.vector = ir.VectorType(FLOAT, n)
        self.zero = ir.Constant(self.vector, [0.0] * n)
        self._splat_mask = ir.Constant(ir.VectorType(SMALL, n), [0] * n)
        prepare_function(builder)

    def variable(self) -> Any:
        """A place for one vector that begins as zeros and becomes a register."""
        return cgutils.alloca_once_value(self.builder, self.zero)

    def load(self, pointer: Any, offset: Any) -> Any:
        """The n floats from pointer[offset] on; any alignment."""
        place = self.builder.bitcast(self.builder.gep(pointer, [offset]), self.vector.as_pointer())
        value = self.builder.load(place)
        value.align = 4
        return value

    def store(self, value: Any, pointer: Any, offset: Any) -> None:
        """Put n floats at pointer[offset]; any alignment."""
        place = self.builder.bitcast(self.builder.gep(pointer, [offset]), self.vector.as_pointer())
        self.builder.store(value, place).align = 4

    def prefetch_to_write(self, pointer: Any, offset: Any) -> None:
        """Ask for the line of pointer[offset], which may lie outside of any array, to read and write it."""
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, SMALL, SMALL, SMALL])
        ask = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0i8")
        place = self.builder.bitcast(self.builder.gep(pointer, [offset]), byte)
        self.builder.call(ask, [place, SMALL(1), SMALL(3), SMALL(1)])

    def splat(self, scalar: Any) -> Any:
        """A scalar in every lane."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        single = self.builder.insert_element(undefined, scalar, SMALL(0))
        return self.builder.shuffle_vector(single, undefined, self._splat_mask)

    def splat_at(self, pointer: Any, offset: Any) -> Any:
        """pointer[offset] in every lane."""
        return self.splat(self.builder.load(self.builder.gep(pointer, [offset])))

    def multiply_add(self, a: Any, x: Any, y: Any) -> Any:
        """A x + y: one rounding where the instruction set has it, else two."""
        if not instruction_set().has_fma:
            return self.builder.fadd(self.builder.fmul(a, x), y)
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        name = f"llvm.fma.v{self.n}f32"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [a, x, y])

    def sum(self, value: Any) -> Any:
        """The sum of the lanes by halves: lane i + lane i + n/2, and so on; a fixed order."""
        width = self.n
        while width > 1:
            width //= 2
            mask = ir.Constant(ir.VectorType(SMALL, self.n), [(i + width) % self.n for i in range(self.n)])
            value = self.builder.fadd(value, self.builder.shuffle_vector(value, value, mask))
        return self.builder.extract_element(value, SMALL(0))


def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of two (vectors of) unsigned integers."""
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def prepare_function(builder: Any) -> None:
    """Let the function under construction use 512-bit registers where it can, and keep it in one place.

    Copies inlined into their callers were measured no faster, and cost compile time each.
    """
    builder.function.attributes.add("noinline")
    for attribute in ('"prefer-vector-width"="512"', '"min-legal-vector-width"="512"'):
        builder.function.attributes._known |= {attribute}
        builder.function.attributes.add(attribute)
