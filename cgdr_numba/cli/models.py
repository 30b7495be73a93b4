"""`cgdr generate` and `cgdr record`: a local transformers model, with its layers on the operators of this package."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgdr_numba.cli.console import errors_in_a_line, print_json, print_table, print_text
from cgdr_numba.cli.report import announce_compiling
from cgdr_numba.errors import ContractError, UnsupportedError
from cgdr_numba.parity.operators import CHUNK_OPERATOR

if TYPE_CHECKING:
    from cgdr_numba.integrations.generation import Generation, Text

Folder = Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Folder of a model; nothing is downloaded.")]
Prompt = Annotated[str, typer.Option(help="Text to begin with.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as the weights are stored.")]

_PATHS = {False: "transformers", True: "cgdr_numba"}


def generate(
    model_dir: Folder,
    prompt: Prompt,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at the most.")] = 64,
    backend: Annotated[
        bool, typer.Option("--backend/--no-backend", help="Run the linear-attention layers here, or by transformers.")
    ] = True,
    compare: Annotated[bool, typer.Option("--compare", help="Do both, and compare tokens and times.")] = False,
    dtype: Dtype = "float32",
    threads: Annotated[int | None, typer.Option(help="Threads of the operators.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, in one line.")] = False,
) -> None:
    """Generate greedily with a local model of transformers.

    Prints the text, tokens a second of the prompt (prefill) and of the tokens behind it (decode), and the
    operator's share of both times. With --compare transformers' own functions run too, and the tokens are compared;
    exits with 1 where they differ.
    """
    with errors_in_a_line(as_json):
        _need_models("generate")
        from cgdr_numba.integrations import generation
        from cgdr_numba.integrations.transformers.architectures import find_layers

        model = generation.load_model(model_dir, dtype)
        text = generation.load_text(model_dir, model)
        tokens = text.encode(prompt)
        generation.check_request("generate", tokens, max_new_tokens)
        if backend or compare:
            has_channels = any(layer.rule.operator == "kda" for layer in find_layers("generate", model))
            announce_compiling(CHUNK_OPERATOR, "fast", has_channels)
        runs: dict[str, Generation] = {}
        for with_backend in (False, True) if compare else (backend,):
            runs[_PATHS[with_backend]] = generation.generate(
                model, tokens, max_new_tokens, backend=with_backend, threads=threads
            )
    if as_json:
        print_json(_as_dict(runs, text, prompt))
    else:
        _print(runs, text, prompt)
    if len({tuple(run.tokens) for run in runs.values()}) > 1:
        raise typer.Exit(1)


def record(
    model_dir: Folder,
    prompt: Prompt,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the files.")],
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to generate: those behind the first take a decode call of each layer.")
    ] = 1,
    expected: Annotated[
        bool, typer.Option("--expected/--no-expected", help="Write golden's float64 results beside the inputs.")
    ] = True,
    dtype: Dtype = "float16",
) -> None:
    """Write a model's operator calls as files for `cgdr run`.

    They are in the NPU operators' form: q and k normalised, sequences one after another, states [N, Hv, Dv, Dk]. Layers
    of Kimi Delta Attention give calls over a pool with one slot a sequence; --backend faithful takes those of up to 8
    tokens, so the decode calls that --max-new-tokens 2 and more ask for.
    """
    with errors_in_a_line():
        _need_models("record")
        from cgdr_numba.integrations import generation
        from cgdr_numba.integrations.recording import record as record_calls

        if output.exists() and not output.is_dir():
            raise ContractError(f"{output}: `--output` must be a folder, got a file")
        model = generation.load_model(model_dir, dtype)
        tokens = generation.load_text(model_dir, model).encode(prompt)
        paths = record_calls(model, tokens, output, max_new_tokens=max_new_tokens, expected=expected)
    print_text("\n".join(f"wrote {path}" for path in paths))


def _need_models(command: str) -> None:
    """Refuse to go on without torch and transformers."""
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as reason:
        raise UnsupportedError(
            f'{command}: torch and transformers must be installed, as the extra "models" does '
            f"(pip install 'cgdr_numba[models]'): {reason}"
        ) from reason
    del torch


def _print(runs: "dict[str, Generation]", text: "Text", prompt: str) -> None:
    """Print runs for people."""
    for name, run in runs.items():
        if run is next(iter(runs.values())) or run.tokens != next(iter(runs.values())).tokens:
            head = f"{name}: " if len(runs) > 1 else ""
            print_text(f"{head}{prompt}{text.decode(run.tokens)}\n")
    rows = [
        (
            name,
            str(run.n_prompt),
            str(len(run.tokens)),
            f"{run.rate('prefill'):.0f}",
            f"{run.rate('decode'):.1f}",
            f"{100 * run.share('prefill'):.0f} %",
            f"{100 * run.share('decode'):.0f} %",
        )
        for name, run in runs.items()
    ]
    columns = ("operator by", "prompt", "new", "prefill tokens/s", "decode tokens/s", "of prefill", "of decode")
    print_table(columns, rows)
    if len(runs) > 1:
        print_text(f"\n{_verdict(*runs.values())}")


def _verdict(first: "Generation", second: "Generation") -> str:
    """Say whether two runs gave the same tokens."""
    if first.tokens == second.tokens:
        return f"all {len(first.tokens)} tokens agree"
    pairs = zip(first.tokens, second.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first.tokens), len(second.tokens)))
    return f"the tokens DIFFER from token {at} on"


def _as_dict(runs: "dict[str, Generation]", text: "Text", prompt: str) -> dict[str, Any]:
    """Return runs as plain values."""
    return {
        "prompt": prompt,
        "tokens_are": text.kind,
        "tokens_agree": len({tuple(run.tokens) for run in runs.values()}) == 1 if len(runs) > 1 else None,
        "runs": {
            name: {
                "text": text.decode(run.tokens),
                "tokens": run.tokens,
                "prompt_tokens": run.n_prompt,
                "prefill_seconds": run.prefill_seconds,
                "decode_seconds": run.decode_seconds,
                "prefill_tokens_per_second": run.rate("prefill"),
                "decode_tokens_per_second": run.rate("decode"),
                "operator_share_of_prefill": run.share("prefill"),
                "operator_share_of_decode": run.share("decode"),
            }
            for name, run in runs.items()
        },
    }
