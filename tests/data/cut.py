"""Cut the committed recorded calls out of the full ones.

``python tests/data/cut.py FOLDER`` reads tiny_packed, tiny_layer0 and tiny_decode (.safetensors) in FOLDER and writes

- ``cgdr_numba/data/sample_packed.safetensors`` and ``sample_decode.safetensors``, the samples that the package ships,
- ``tests/data/packed_one_head.safetensors`` and ``tests/data/layer0_prefix.safetensors``, fixtures of the tests,

byte for byte the same at every run. A cut is a call by itself: heads do not see one another, neither do sequences, and
outputs do not see later tokens. So the references stay valid, except for the final state of a sequence that is cut
short, which is left out. Every cut is checked against them with the golden backend before it is written.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from cgdr_numba.parity.calls import RecordedCall, load_call, save_call
from cgdr_numba.parity.metrics import BOUNDS
from cgdr_numba.parity.replays import compare, replay

ROOT = Path(__file__).resolve().parents[2]
PREFIX_TOKENS = 320


def cut_heads(call: RecordedCall, key_head: int, value_heads: slice) -> RecordedCall:
    """Keep one key head and some of the value heads that it serves."""
    keys = slice(key_head, key_head + 1)
    axis_1 = {"query": keys, "key": keys}
    vectors = ("actual_seq_lengths", "num_accepted_tokens", "ssm_state_indices")
    arrays = {
        name: array if name in vectors else array[:, axis_1.get(name, value_heads)]
        for name, array in call.arrays.items()
    }
    return replace(call, arrays=arrays, expected={name: array[:, value_heads] for name, array in call.expected.items()})


def cut_sequences(call: RecordedCall, n_sequences: int) -> RecordedCall:
    """Keep the first sequences."""
    n_tokens = int(call.arrays["actual_seq_lengths"][:n_sequences].sum())
    rows = {"initial_state": n_sequences, "actual_seq_lengths": n_sequences, "final_state": n_sequences}

    def cut(arrays: "dict[str, np.ndarray]") -> "dict[str, np.ndarray]":
        return {name: array[: rows.get(name, n_tokens)] for name, array in arrays.items()}

    return replace(call, arrays=cut(dict(call.arrays)), expected=cut(dict(call.expected)))


def cut_pool(call: RecordedCall, sequences: list[int], n_untouched: int) -> RecordedCall:
    """Keep some sequences of a call over a pool, the slots that they name in a new order, and a few untouched ones."""
    lengths = call.arrays["actual_seq_lengths"]
    starts = np.cumsum(lengths) - lengths
    tokens = np.concatenate([np.arange(starts[n], starts[n] + lengths[n]) for n in sequences])
    slots = call.arrays["ssm_state_indices"]
    untouched = np.setdiff1d(np.arange(len(call.arrays["state"])), slots)[:n_untouched]
    kept = np.sort(np.concatenate([slots[tokens], untouched]))
    rows = {"actual_seq_lengths": sequences, "num_accepted_tokens": sequences, "state": kept}

    def cut(arrays: "dict[str, np.ndarray]") -> "dict[str, np.ndarray]":
        return {name: array[rows.get(name, tokens)] for name, array in arrays.items()}

    arrays = cut(dict(call.arrays))
    arrays["ssm_state_indices"] = np.searchsorted(kept, arrays["ssm_state_indices"]).astype(slots.dtype)
    return replace(call, arrays=arrays, expected=cut(dict(call.expected)))


def cut_tokens(call: RecordedCall, n_tokens: int) -> RecordedCall:
    """Keep the first tokens of a call of one sequence, and no final state."""
    whole = ("initial_state", "actual_seq_lengths")
    arrays = {name: array if name in whole else array[:n_tokens] for name, array in call.arrays.items()}
    arrays["actual_seq_lengths"] = np.array([n_tokens], call.arrays["actual_seq_lengths"].dtype)
    return replace(call, arrays=arrays, expected={"out": call.expected["out"][:n_tokens]})


def write(path: Path, call: RecordedCall, note: str) -> None:
    """Check a cut with the golden backend and write it."""
    noted = replace(call, metadata={**call.metadata, "cut": note})
    for name, found in compare(noted, *replay(noted, "golden")).items():
        if not found.worst <= BOUNDS["float64"]:
            raise SystemExit(f"{path.name}: golden differs from {name} by a relative rms of {found.worst}")
        print(f"{path.name}: {name} worst relative rms {found.worst:.3e} at {found.worst_at}")
    save_call(path, noted)
    print(f"{path.name}: {path.stat().st_size} bytes; {note}")


def main() -> None:
    """Cut and write the four files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the full recorded calls")
    folder = parser.parse_args().folder
    names = ("tiny_packed", "tiny_layer0", "tiny_decode")
    packed, layer0, decode = (load_call(folder / f"{name}.safetensors") for name in names)
    write(
        ROOT / "cgdr_numba" / "data" / "sample_packed.safetensors",
        cut_heads(cut_sequences(packed, 2), 0, slice(0, 2)),
        "tiny_packed, key head 0, value heads 0 and 1, the first two sequences",
    )
    write(
        ROOT / "cgdr_numba" / "data" / "sample_decode.safetensors",
        cut_heads(cut_pool(decode, [0, 2], 1), 1, slice(2, 3)),
        "tiny_decode, key head 1, value head 2, sequences 0 and 2, their slots and an untouched one in a new order",
    )
    data = ROOT / "tests" / "data"
    write(
        data / "packed_one_head.safetensors",
        cut_heads(packed, 1, slice(3, 4)),
        "tiny_packed, key head 1, value head 3",
    )
    head = int(layer0.arrays["g"].min(axis=0).argmin())
    key_head = head // (layer0.arrays["value"].shape[1] // layer0.arrays["key"].shape[1])
    write(
        data / "layer0_prefix.safetensors",
        cut_tokens(cut_heads(layer0, key_head, slice(head, head + 1)), PREFIX_TOKENS),
        f"tiny_layer0, key head {key_head}, value head {head} (the most negative g), the first {PREFIX_TOKENS} tokens",
    )


if __name__ == "__main__":
    main()
