"""Which slot of a pool every sequence reads and every token writes, checked against races."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.checks import Checks
from cgdr_numba.core.ragged import Sequences

PADDING = -1
"""The slot of padding rows."""
_NOTHING = np.zeros(0, np.int64)


class SlotIndices(NamedTuple):
    """The index arguments of a call as they came."""

    ssm_state_indices: object
    num_accepted_tokens: object = None
    read_indices: object = None


class Slots(NamedTuple):
    """The slots of a call, and what is left of its sequences."""

    read: NDArray[np.int64]
    """[N]; -1 for sequences of length 0."""
    write: NDArray[np.int64]
    """[T]; -1 for padding rows."""
    padding: NDArray[np.int64]
    """The padding rows, ascending."""
    sequences: Sequences
    """The sequences; those of padding rows have length 0."""


def assign_slots(checks: Checks, indices: SlotIndices, sequences: Sequences, n_tokens: int, n_slots: int) -> Slots:
    """Check the index arguments of a call and return its slots.

    A token outside of all sequences is a padding row and must have slot -1. A sequence all of whose slots are -1 is
    padding too; -1 beside other slots is refused, and so is any other number outside of the pool. A slot that one
    sequence writes, no other may read or write.
    """
    name = "ssm_state_indices"
    write = checks.integers(name, indices.ssm_state_indices)
    checks.shape(name, write, "T", (n_tokens,))
    _check_range(checks, name, write, n_slots, "token")
    # A decode step has few tokens, for which a list is faster than a vector.
    slots, lengths = write.tolist(), sequences.length.tolist()
    padding = _NOTHING
    is_whole = min(slots, default=0) >= 0 and sum(lengths) == n_tokens
    if not is_whole:
        padding = np.flatnonzero(write < 0)
        sequences = _without_padding(checks, sequences, write)
    is_plain = indices.num_accepted_tokens is None and indices.read_indices is None
    if is_whole and is_plain and 0 not in lengths:
        read = write[sequences.start]
    else:
        read = _read_slots(checks, indices, sequences, write, n_slots)
    # Without duplicates, and without slots from elsewhere to read, no two sequences can meet.
    if indices.read_indices is not None or len(set(slots)) < n_tokens:
        _check_races(checks, sequences, write, read)
    return Slots(read, write, padding, sequences)


def _check_range(checks: Checks, name: str, slots: NDArray[np.int64], n_slots: int, of_what: str) -> None:
    """Refuse slots that are neither in the pool nor padding."""
    listed = slots.tolist()
    if min(listed, default=0) < PADDING or max(listed, default=-1) >= n_slots:
        at = int(np.flatnonzero((slots < PADDING) | (slots >= n_slots))[0])
        raise checks.error(
            f"`{name}` must be slots from 0 to {n_slots - 1}, or {PADDING} for padding, got {slots[at]} at {of_what} "
            f"{at}"
        )


def _without_padding(checks: Checks, sequences: Sequences, write: NDArray[np.int64]) -> Sequences:
    """Return the sequences with those of padding rows cut to length 0, after the check that no row is half padding."""
    is_covered = np.zeros(len(write), bool)
    lengths = sequences.length.copy()
    for n, (start, length) in enumerate(zip(sequences.start.tolist(), sequences.length.tolist(), strict=True)):
        is_covered[start : start + length] = True
        is_padding = write[start : start + length] < 0
        if is_padding.all():
            lengths[n] = 0
        elif is_padding.any():
            raise checks.error(
                f"`ssm_state_indices` must be {PADDING} for all tokens of a sequence or for none, got it at token "
                f"{start + int(np.flatnonzero(is_padding)[0])} of sequence {n}, tokens {start} to {start + length - 1}"
            )
    lost = np.flatnonzero(~is_covered & (write >= 0))
    if len(lost):
        raise checks.error(
            f"`ssm_state_indices` must be {PADDING} for tokens outside of all sequences (`actual_seq_lengths` sums to "
            f"{int(sequences.length.sum())} of {len(write)} tokens), got {write[lost[0]]} at token {lost[0]}"
        )
    return sequences._replace(length=lengths)


def _read_slots(
    checks: Checks, indices: SlotIndices, sequences: Sequences, write: NDArray[np.int64], n_slots: int
) -> NDArray[np.int64]:
    """Return the slot that each sequence begins with: by accepted tokens, by read_indices, or its first token's."""
    _, accepted, given = indices
    n_sequences, lengths = len(sequences.row), sequences.length
    if given is not None:
        if accepted is not None:
            raise checks.error("`read_indices` excludes `num_accepted_tokens`, got both")
        read = checks.integers("read_indices", given)
        checks.shape("read_indices", read, "N", (n_sequences,))
        _check_range(checks, "read_indices", read, n_slots, "sequence")
        lost = np.flatnonzero((read < 0) & (lengths > 0))
        if len(lost):
            raise checks.error(
                f"`read_indices` must be slots from 0 to {n_slots - 1} where a sequence has tokens, got "
                f"{read[lost[0]]} for sequence {lost[0]} of {lengths[lost[0]]}"
            )
        return np.where(lengths > 0, read, PADDING)
    offset = _accepted_offsets(checks, accepted, lengths)
    if not len(write):
        return np.full(n_sequences, PADDING, np.int64)
    at = np.minimum(sequences.start + offset, len(write) - 1)
    return np.where(lengths > 0, write[at], PADDING)


def _accepted_offsets(checks: Checks, value: object, lengths: NDArray[np.int64]) -> NDArray[np.int64] | int:
    """Return the token, counted in its sequence, whose slot holds the state; 0 where no counts are given."""
    if value is None:
        return 0
    name = "num_accepted_tokens"
    accepted = checks.integers(name, value)
    checks.shape(name, accepted, "N", lengths.shape)
    wrong = np.flatnonzero((lengths > 0) & ((accepted < 1) | (accepted > lengths)))
    if len(wrong):
        n = int(wrong[0])
        raise checks.error(
            f"`{name}` must be from 1 to the sequence's length, {lengths[n]}, got {accepted[n]} for sequence {n}"
        )
    return np.where(lengths > 0, accepted - 1, 0)


def _check_races(checks: Checks, sequences: Sequences, write: NDArray[np.int64], read: NDArray[np.int64]) -> None:
    """Refuse a slot that one sequence writes and another one reads or writes."""
    slots, owners = write.tolist(), dict[int, int]()
    for n, (start, length) in enumerate(zip(sequences.start.tolist(), sequences.length.tolist(), strict=True)):
        for t in range(start, start + length):
            owner = owners.setdefault(slots[t], n)
            if owner != n:
                raise checks.error(
                    f"`ssm_state_indices` must have a slot in one sequence only, got slot {slots[t]} in sequences "
                    f"{owner} and {n}"
                )
    for n, slot in enumerate(read.tolist()):
        if slot >= 0 and owners.get(slot, n) != n:
            raise checks.error(
                f"`read_indices` must not be slots that another sequence writes, got slot {slot} for sequence {n}, "
                f"which sequence {owners[slot]} writes"
            )
