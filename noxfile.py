"""Longer checks: other Python versions, versions of transformers, bounds checking, exhaustive random problems."""

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
@nox.parametrize("cpu", ["haswell", "generic"])
def instruction_sets(session: nox.Session, cpu: str) -> None:
    """The suite on other instruction sets that this machine can run: AVX2, and none beyond SSE2."""
    install(session)
    session.run("pytest", *session.posargs, env={"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""})


@nox.session
def exhaustive(session: nox.Session) -> None:
    """The random problems in their full number."""
    install(session)
    paths = ["tests/faithful", "tests/ops/test_fast_random.py", "tests/ops/test_fast_nonfinite.py"]
    session.run("pytest", *paths, *session.posargs, env={"CGDR_EXHAUSTIVE": "1"})


@nox.session(python=["3.11", "3.12", "3.13"])
def pythons(session: nox.Session) -> None:
    """The suite on every Python that the package declares."""
    install(session)
    session.run("pytest", *session.posargs)


MODELS = {
    "5.24": ["transformers==5.24.*"],
    "5.22": ["transformers==5.22.*", "kernels==0.17.*"],
    "5.12": ["transformers==5.12.*"],
}
"""By version of transformers: what is installed beside torch. One version for each way that models call operators."""

MODELS_TESTS = ["tests/integrations", "tests/cli/test_models.py", "cgdr_numba/integrations"]


@nox.session
@nox.parametrize("version", list(MODELS), ids=list(MODELS))
def models(session: nox.Session, version: str) -> None:
    """Transformers' models through one route, and torch's tensors and custom ops."""
    # The same torch everywhere; where an index of CPU builds is known to pip, its +cpu build satisfies this too.
    session.install("torch==2.13.0", *MODELS[version], "-e", ".[test]")
    # Small layers on a busy machine: threads that spin while others work would take most of the time.
    env = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    session.run("pytest", "-q", *(session.posargs or MODELS_TESTS), env=env)
