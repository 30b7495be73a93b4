"""A transformers model with real head sizes, with and without the operators of this package, in turns in one run.

python bench/models.py [--dtype float32] [--rounds 3] [--batch 1 8] [--tokens 2048]: prefill of 2048 tokens and decode
behind it, batches of 1 and 8; times of the operator and of the whole model, two layers together.
"""

import argparse
import statistics
import time
from collections import Counter, defaultdict
from typing import Any

import torch
import transformers

from cgdr_numba.integrations.generation import step
from cgdr_numba.integrations.transformers import observed
from cgdr_numba.integrations.transformers.operators import OurOperators

HEADS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
N_DECODE = 32


class Timed:
    """Operators, None for transformers' own, with a stopwatch."""

    def __init__(self, ours: bool) -> None:
        self.operators = OurOperators("gdr", None, Counter()) if ours else None
        self.seconds = 0.0

    def __call__(self, call: Any, run: Any) -> Any:
        """Run a call; convolutions are not counted."""
        begin = time.perf_counter()
        result = self.operators(call, run) if self.operators else call.run_original()
        if call.part != "convolution":
            self.seconds += time.perf_counter() - begin
        return result


def build(dtype: str) -> Any:
    """Return a model of two linear-attention layers and a full one, with random weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        **HEADS,
        **SIZES,
        vocab_size=1024,
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    )
    return transformers.Qwen3_5ForCausalLM(config).to(getattr(torch, dtype)).eval()


def measure(model: Any, batch: int, n_tokens: int, timed: Timed) -> dict[str, tuple[float, float, torch.Tensor]]:
    """Return (operator, model) seconds and the last logits, of a prefill and of the median decode step after it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 1024, (batch, n_tokens), generator=generator)
    found = {}
    with torch.inference_mode():
        times, cache = [], None
        for _ in range(1 + N_DECODE):
            timed.seconds, begin = 0.0, time.perf_counter()
            logits, cache = step(model, ids, cache)
            times.append((timed.seconds, time.perf_counter() - begin))
            if len(times) == 1:
                found["prefill"] = (*times[0], logits)
            ids = torch.full((batch, 1), 7)
    operator, whole = (statistics.median(column) for column in zip(*times[1:], strict=True))
    found["decode"] = (operator, whole, logits)
    return found


def main() -> None:
    """Measure in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompts")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model = build(asked.dtype)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{asked.dtype}, {torch.get_num_threads()} threads, {versions}")
    print("| batch, part | operator: transformers | ours | times | model: transformers | ours | times | difference |")
    print("|---|---|---|---|---|---|---|---|")
    for batch in asked.batch:
        runs: dict[tuple[str, bool], list[Any]] = defaultdict(list)
        for turn in range(asked.rounds + 1):
            for ours in (False, True):
                timed = Timed(ours)
                with observed(model, lambda _, timed=timed: timed):
                    if turn == 0:
                        measure(model, batch, 64, timed)  # compiles, and touches every weight
                        continue
                    for part, result in measure(model, batch, asked.tokens, timed).items():
                        runs[part, ours].append(result)
        for part in ("prefill", "decode"):
            row = [f"{batch}, {part}"]
            for column in (0, 1):
                theirs, ours = (statistics.median(x[column] for x in runs[part, which]) for which in (False, True))
                row += [f"{1e3 * theirs:.2f} ms", f"{1e3 * ours:.2f} ms", f"{theirs / ours:.2f} x"]
            a, b = (runs[part, which][0][2].double() for which in (True, False))
            print("| " + " | ".join([*row, f"{float((a - b).norm() / b.norm()):.1e}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
