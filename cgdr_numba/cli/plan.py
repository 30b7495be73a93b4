"""`cgdr plan`: how a call runs on a device, without running it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import typer

from cgdr_numba.cli.console import errors_in_a_line, print_json, print_text
from cgdr_numba.core.checks import Checks
from cgdr_numba.core.dims import Dims
from cgdr_numba.core.threads import current_threads
from cgdr_numba.parity.calls import AnyPlan, load_call
from cgdr_numba.parity.replays import POOL_PLANNED, plan_call
from cgdr_numba.sched.device import DeviceSpec, resolve
from cgdr_numba.sched.plan import KERNEL_DTYPE, PLANNED_BACKENDS, PLANNED_DTYPES, plan_chunk
from cgdr_numba.sched.pool_plan import plan_step


class _How(NamedTuple):
    """What is asked for beside the sizes."""

    is_recurrent: bool
    backend: str
    dtype: str
    gates: tuple[bool, str]
    """Whether there is a g, and the form of gk; for the recurrent operator alone."""
    device: DeviceSpec
    v_step: int | None


def plan(
    call: Annotated[
        Path | None,
        typer.Argument(metavar="CALL", help="Recorded call; or give the sizes below.", show_default=False),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Tokens of each sequence.", show_default=False)
    ] = None,
    nk: Annotated[int | None, typer.Option(help="Heads of query and key.", show_default=False)] = None,
    nv: Annotated[int | None, typer.Option(help="Heads of value.", show_default=False)] = None,
    dk: Annotated[int | None, typer.Option(help="Width of a key.", show_default=False)] = None,
    dv: Annotated[int | None, typer.Option(help="Width of a value.", show_default=False)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float16 (default), or as an extension bfloat16 or float32.", show_default=False)
    ] = None,
    operator: Annotated[
        str | None,
        typer.Option(help="chunk (default; prefill) or recurrent (decode over a pool).", show_default=False),
    ] = None,
    gk: Annotated[
        str | None, typer.Option(help="recurrent: none (default), scalar or vector.", show_default=False)
    ] = None,
    no_g: Annotated[bool, typer.Option("--no-g", help="recurrent: without g.")] = False,
    backend: Annotated[str, typer.Option(help="faithful or fast.")] = "faithful",
    target: Annotated[
        str | None,
        typer.Option(
            help="Device to plan for: 310p (default of faithful) or host (default of fast).", show_default=False
        ),
    ] = None,
    ub: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Other UB (fast: cache) than the target's.", show_default=False)
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(metavar="N", help="Other number of cores (fast: threads) than the target's.", show_default=False),
    ] = None,
    v_step: Annotated[
        int | None, typer.Option(metavar="N", help="faithful: this V tile instead of the widest.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, in one line.")] = False,
) -> None:
    """Show how a call runs on a device, without running it.

    Prints the V tiles, the map of the unified buffer (fast: the bytes of scratch), the bins with their loads, and the
    balance; for the recurrent operator also how states come in ahead, what a head costs, and by how many bytes the
    NPU's scratch would overflow unseen. The sizes come from a recorded call, or from --lengths, --nk, --nv, --dk and
    --dv. A plan that does not fit the unified buffer prints its ledger and exits with 1. fast on the host is planned
    for numba's number of threads.
    """
    sizes = {"--nk": nk, "--nv": nv, "--dk": dk, "--dv": dv}
    _check_usage(
        call,
        {"--lengths": lengths, **sizes},
        {"--dtype": dtype, "--operator": operator, "--gk": gk, "--no-g": no_g or None},
    )
    with errors_in_a_line(as_json):
        checks = Checks("plan")
        is_recurrent = checks.choice("--operator", operator or "chunk", ("chunk", "recurrent")) == "recurrent"
        if not is_recurrent and (gk is not None or no_g):
            raise checks.error("`--gk` and `--no-g` must be left out without `--operator recurrent`")
        how = _How(
            is_recurrent,
            checks.choice("--backend", backend, POOL_PLANNED if is_recurrent else PLANNED_BACKENDS),
            checks.choice("--dtype", dtype or KERNEL_DTYPE, PLANNED_DTYPES),
            (not no_g, checks.choice("--gk", gk or "none", ("none", "scalar", "vector"))),
            _device(backend, target, ub, cores),
            v_step,
        )
        if call is not None:
            made = plan_call(load_call(call), how.device, v_step, backend=backend)
        else:
            made = _plan_of_sizes(lengths or "", sizes, how)
    if as_json:
        print_json(made.as_dict())
    else:
        print_text(made.explain())


def _check_usage(call: Path | None, sizes: Mapping[str, object], kinds: Mapping[str, object]) -> None:
    """Refuse sizes, or what kind of call it is, beside a call, and neither of both."""
    given = [name for name, value in (*sizes.items(), *kinds.items()) if value is not None]
    missing = [name for name, value in sizes.items() if value is None]
    if call is not None and given:
        raise typer.BadParameter(f"CALL has its own sizes; leave out {', '.join(given)}")
    if call is None and missing:
        raise typer.BadParameter(f"give CALL, or all of {', '.join(sizes)}; missing: {', '.join(missing)}")


def _device(backend: str, target: str | None, ub: int | None, cores: int | None) -> DeviceSpec:
    """Return the target, with the sizes that were asked for."""
    device = resolve(target, "host" if backend == "fast" else "310p", "plan")
    if backend == "fast" and target is None:
        device = replace(device, cores=current_threads())
    if ub is not None:
        device = replace(device, ub_bytes=ub, source=f"{device.source}; --ub")
    if cores is not None:
        device = replace(device, cores=cores, source=f"{device.source}; --cores")
    return device


def _plan_of_sizes(lengths: str, sizes: Mapping[str, int | None], how: _How) -> AnyPlan:
    """Plan for the sizes on the command line."""
    try:
        tokens = [int(length) for length in lengths.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--lengths must be integers with commas between, got {lengths!r}") from None
    hk, hv, dk, dv = (value or 0 for value in sizes.values())
    dims = Dims(sum(tokens), len(tokens), hk, hv, dk, dv)
    if how.is_recurrent:
        has_g, gk = how.gates
        return plan_step(
            dims, tokens, g=has_g, gk=cast("Any", gk), dtype=how.dtype, target=how.device, v_step=how.v_step
        )
    return plan_chunk(
        dims, tokens, backend=cast("Any", how.backend), dtype=how.dtype, target=how.device, v_step=how.v_step
    )
