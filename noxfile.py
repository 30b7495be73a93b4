"""Longer checks: other Python versions, bounds checking, exhaustive random problems."""

import nox

nox.options.sessions = ["boundscheck", "exhaustive"]
nox.options.reuse_existing_virtualenvs = True


def install(session: nox.Session) -> None:
    """Install the package with its test extra."""
    session.install("-e", ".[test]")


@nox.session
def boundscheck(session: nox.Session) -> None:
    """The whole suite with every array index of a kernel checked."""
    install(session)
    session.run("pytest", *session.posargs, env={"NUMBA_BOUNDSCHECK": "1"})


@nox.session
def exhaustive(session: nox.Session) -> None:
    """The random problems in their full number."""
    install(session)
    session.run("pytest", "tests/faithful", *session.posargs, env={"CGDR_EXHAUSTIVE": "1"})


@nox.session(python=["3.11", "3.12", "3.13"])
def pythons(session: nox.Session) -> None:
    """The suite on every Python that the package declares."""
    install(session)
    session.run("pytest", *session.posargs)
