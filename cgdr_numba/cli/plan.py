"""`cgdr plan`: how a call runs on a device, without running it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from cgdr_numba.cli.console import errors_in_a_line, print_json, print_text
from cgdr_numba.core.checks import Checks
from cgdr_numba.core.dims import Dims
from cgdr_numba.parity.calls import load_call, plan_call
from cgdr_numba.sched.device import DeviceSpec, resolve
from cgdr_numba.sched.plan import KERNEL_DTYPE, Plan, plan_chunk

_DTYPES: Final = (KERNEL_DTYPE, "bfloat16", "float32")
"""dtypes of q, k and v that faithful runs."""


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
    target: Annotated[str, typer.Option(help="Device to plan for: 310p or host.")] = "310p",
    ub: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Other UB size than the target's.", show_default=False)
    ] = None,
    cores: Annotated[
        int | None, typer.Option(metavar="N", help="Other number of cores than the target's.", show_default=False)
    ] = None,
    v_step: Annotated[
        int | None, typer.Option(metavar="N", help="This V tile instead of the widest that fits.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, in one line.")] = False,
) -> None:
    """Show how a call runs on a device, without running it.

    Prints the V tiles, the map of the unified buffer, the bins with their loads, and the balance. The sizes come from
    a recorded call, or from --lengths, --nk, --nv, --dk and --dv. A plan that does not fit the unified buffer prints
    its ledger and exits with 1.
    """
    sizes = {"--nk": nk, "--nv": nv, "--dk": dk, "--dv": dv}
    _check_usage(call, {"--lengths": lengths, **sizes}, dtype)
    with errors_in_a_line(as_json):
        device = _device(target, ub, cores)
        if call is not None:
            made = plan_call(load_call(call), device, v_step)
        else:
            made = _plan_of_sizes(lengths or "", sizes, dtype or KERNEL_DTYPE, device, v_step)
    if as_json:
        print_json(made.as_dict())
    else:
        print_text(made.explain())


def _check_usage(call: Path | None, sizes: Mapping[str, object], dtype: str | None) -> None:
    """Refuse sizes beside a call, and neither of both."""
    given = [name for name, value in (*sizes.items(), ("--dtype", dtype)) if value is not None]
    missing = [name for name, value in sizes.items() if value is None]
    if call is not None and given:
        raise typer.BadParameter(f"CALL has its own sizes; leave out {', '.join(given)}")
    if call is None and missing:
        raise typer.BadParameter(f"give CALL, or all of {', '.join(sizes)}; missing: {', '.join(missing)}")


def _device(target: str, ub: int | None, cores: int | None) -> DeviceSpec:
    """Return the target, with the sizes that were asked for."""
    device = resolve(target, "310p", "plan")
    if ub is not None:
        device = replace(device, ub_bytes=ub, source=f"{device.source}; --ub")
    if cores is not None:
        device = replace(device, cores=cores, source=f"{device.source}; --cores")
    return device


def _plan_of_sizes(
    lengths: str, sizes: Mapping[str, int | None], dtype: str, device: DeviceSpec, v_step: int | None
) -> Plan:
    """Plan for the sizes on the command line."""
    try:
        tokens = [int(length) for length in lengths.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--lengths must be integers with commas between, got {lengths!r}") from None
    dtype = Checks("plan").choice("--dtype", dtype, _DTYPES)
    hk, hv, dk, dv = (value or 0 for value in sizes.values())
    return plan_chunk(Dims(sum(tokens), len(tokens), hk, hv, dk, dv), tokens, dtype=dtype, target=device, v_step=v_step)
