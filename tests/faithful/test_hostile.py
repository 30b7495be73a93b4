"""Broken arguments, one to three at a time: always the contract's own errors, and no trace of them afterwards."""

import re
from functools import cache

import numpy as np
import pytest

from broken import FAMILIES, MISSING, Arguments, Break, Family, breaks_of, pick, sound
from cgdr_numba import ContractError
from judge import same_bits

BACKENDS = ("faithful", "golden", "fast")
SIDES = re.compile(r"(must|excludes|need) .*, got |float64 q, k and v are golden's only, and `backend` is '")
"""The rule, then what came; float64 has words of its own, since what came is not wrong for every backend."""


def faults_of(family: Family, call: Arguments, breaks: list[Break]) -> str:
    """Run the broken call; gives what is wrong with how it ended, or nothing."""
    arguments = call | {name: value for one in breaks for name, value in one.changes.items()}
    arguments = {name: value for name, value in arguments.items() if value is not MISSING}
    about_keywords = [one for one in breaks if one.came in {f"'{name}'" for name in one.changes}]
    try:
        family.function(**arguments)
    except (ContractError, TypeError) as error:
        message = str(error)
        if about_keywords:
            named = any(one.came in message for one in about_keywords)
            return "" if type(error) is TypeError and named else f"keyword not named: {error!r}"
        if not isinstance(error, ContractError):
            return f"escaped: {error!r}"
    except Exception as error:
        return f"escaped: {error!r}"
    else:
        return "nothing was raised"
    names = {name for one in breaks for name in (*one.changes, *one.parties)}
    if not names & set(re.findall(r"[`'\"](\w+)[`'\"]", message)):
        return f"names none of {sorted(names)}: {message}"
    if not message.startswith(f"{family.function.__name__}: "):
        return f"names another function: {message}"
    if not SIDES.search(message.replace("\n", " ")):
        return f"lacks the rule or what came: {message}"
    if not any(one.came in message for one in breaks):
        return f"none of {[one.came for one in breaks]} in: {message}"
    return ""


@cache
def sound_result(family: str, backend: str) -> tuple[np.ndarray, ...]:
    """Out (and state) of the sound call, from before anything was broken."""
    return results(FAMILIES[family], backend)


def results(family: Family, backend: str) -> tuple[np.ndarray, ...]:
    """Out, and state where there is one."""
    return tuple(x for x in family.function(**sound(family, backend)) if x is not None)


def assert_refused(family: str, backend: str, breaks: list[Break]) -> None:
    """The broken call is refused in the contract's words, and the sound one goes on as before."""
    before = sound_result(family, backend)
    fault = faults_of(FAMILIES[family], sound(FAMILIES[family], backend), breaks)
    assert not fault, fault
    after = results(FAMILIES[family], backend)
    assert all(same_bits(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("seed", range(500))
def test_broken_arguments(seed: int) -> None:
    rng = np.random.default_rng([500, seed])
    family, backend = pick(rng, [(family, backend) for family in FAMILIES for backend in BACKENDS])
    assert_refused(family, backend, breaks_of(rng, FAMILIES[family], sound(FAMILIES[family], backend)))


ALONE: dict[str, tuple[str, Arguments, str]] = {
    "a scale that no float holds": ("fla", {"scale": 10**400}, ""),
    "lengths of unequal depth": ("cann", {"actual_seq_lengths": [[3], [3, 1]]}, "got [3]"),
    "sums of unequal depth": ("fla", {"cu_seqlens": [[0, 3], 7]}, "got [0, 3]"),
    "lengths beyond 64 bits": ("cann", {"actual_seq_lengths": [2**70, 4]}, str(2**70)),
    "lengths of mixed signs beyond 64 bits": ("cann", {"actual_seq_lengths": [2**63, -1]}, str(2**63)),
    "several backends": ("fla", {"backend": np.array(["golden", "faithful"])}, "array(['golden', 'faithful']"),
    "a backend in an array": ("fla", {"backend": np.array("fast")}, "array('fast'"),
    "several targets": ("fla", {"target": np.array(["310p", "host"])}, "array(['310p', 'host']"),
    "a target in an array": ("fla", {"target": np.array("310p")}, "array('310p'"),
}
"""What NumPy and Python themselves stumble over before a check could see it."""


@pytest.mark.parametrize("name", ALONE)
def test_arguments_that_break_checks(name: str) -> None:
    family, changes, came = ALONE[name]
    assert_refused(family, "faithful", [Break(changes, came)])
