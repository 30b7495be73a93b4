"""Named arrays and texts in a file: safetensors both ways, npz to be read."""

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from cgdr_numba.errors import ContractError

Array = NDArray[Any]

_SAFETENSORS_DTYPES = ("F16", "BF16", "F32", "F64", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL")
"""What NumPy (with ml_dtypes) has a dtype for."""


class Contents(NamedTuple):
    """What a file holds."""

    arrays: dict[str, Array]
    metadata: dict[str, str]


def read(path: Path) -> Contents:
    """Return the arrays and the metadata of a .safetensors or .npz file.

    In an npz, entries without axes are metadata (a text or a number each). Pickled objects are refused.

    Raises:
        ContractError: There is no such file, or it cannot be read as what its name says.
    """
    readers = {".safetensors": _read_safetensors, ".npz": _read_npz}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ContractError(f"{path}: a recorded call must be a .safetensors or .npz file, got suffix {path.suffix!r}")
    if not path.is_file():
        raise ContractError(f"{path}: {'is a folder, not a file' if path.is_dir() else 'there is no such file'}")
    try:
        return reader(path)
    except OSError as error:
        raise ContractError(f"{path}: cannot be read: {_one_line(error)}") from error


def write(path: Path, contents: Contents) -> None:
    """Write a .safetensors file; the same contents give the same bytes.

    Raises:
        ContractError: The name does not end in .safetensors.
        OSError: The file cannot be written.
    """
    check_name(path)
    # NOTE: safetensors writes the buffer of an array as it lies, so another order would permute the elements silently.
    in_order = {name: np.asarray(array, order="C") for name, array in contents.arrays.items()}
    path.write_bytes(_sorted_header(save(in_order, contents.metadata)))


def check_name(path: Path) -> None:
    """Refuse a name that does not end in .safetensors, for a file to be written."""
    if path.suffix != ".safetensors":
        raise ContractError(f"{path}: files are written as .safetensors, got suffix {path.suffix!r}")


def _sorted_header(data: bytes) -> bytes:
    """Return a safetensors file with its header's keys in order; the library's own order changes from run to run."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]


def _read_safetensors(path: Path) -> Contents:
    """Read a safetensors file."""
    arrays = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                dtype = file.get_slice(name).get_dtype()
                if dtype not in _SAFETENSORS_DTYPES:
                    raise ContractError(f"{path}: `{name}` must have a dtype that NumPy has, got {dtype}")
                arrays[name] = file.get_tensor(name)
            return Contents(arrays, dict(file.metadata() or {}))
    except SafetensorError as error:
        raise ContractError(f"{path}: must be a complete safetensors file, got: {_one_line(error)}") from error


def _read_npz(path: Path) -> Contents:
    """Read an npz file."""
    try:
        # Opened here: NumPy leaves a damaged file that it opened by itself to the garbage collector.
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ContractError(f"{path}: must be an npz archive, got a single array")
            entries = {name: file[name] for name in file.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        if isinstance(error, ContractError):
            raise
        text = f"{path}: must be a complete npz archive of plain arrays, got: {_one_line(error)}"
        raise ContractError(text) from error
    for name, array in entries.items():
        if array.dtype == np.dtype("V2"):
            raise ContractError(
                f"{path}: `{name}` has 2-byte elements of no dtype, which is what an npz makes of bfloat16: "
                "save the call as .safetensors, which keeps the dtype"
            )
    metadata = {name: _text(array.item()) for name, array in entries.items() if array.ndim == 0}
    return Contents({name: array for name, array in entries.items() if array.ndim > 0}, metadata)


def _text(value: object) -> str:
    """Return a metadata value as text; numbers in full."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _one_line(error: Exception) -> str:
    """Return an error's own words in one line."""
    return " ".join(str(error).split()) or type(error).__name__
