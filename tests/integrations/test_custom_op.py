"""The torch custom ops: correct fakes, one node for torch.compile, equal results, no backward pass."""

from typing import Any

import pytest

import cgdr_numba
from cgdr_numba import UnsupportedError

torch = pytest.importorskip("torch")
ops = pytest.importorskip("cgdr_numba.integrations.torch")

NAMES = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
B, T, HK, HV, DK, DV = 2, 5, 1, 2, 8, 6


def call_of(dtype: Any = None, n_tokens: int = T, batch: int = B) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    kind = dtype or torch.float32

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    return {
        "q": random(batch, HK * DK, n_tokens).transpose(1, 2).view(batch, n_tokens, HK, DK).to(kind),
        "k": random(batch, n_tokens, HK, DK).to(kind),
        "v": random(batch, n_tokens, HV, DV).to(kind),
        "g": -random(batch, n_tokens, HV).abs(),
        "beta": random(batch, n_tokens, HV).sigmoid().to(kind),
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options", [{}, {"output_final_state": True}, {"output_final_state": True, "state_v_first": True}]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ops_give_the_functions_bits(name: str, options: dict[str, Any], dtype: str) -> None:
    call = call_of(getattr(torch, dtype)) | {"use_qk_l2norm_in_kernel": True} | options
    out, state = getattr(ops, name)(**call)
    expected, expected_state = getattr(cgdr_numba, name)(**call)
    assert torch.equal(out, expected)
    assert (state is None) == (expected_state is None)
    assert state is None or torch.equal(state, expected_state)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wants_state", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_torchs_own_checks_of_the_op(name: str, wants_state: bool, packed: bool) -> None:
    call = call_of(torch.bfloat16, batch=1)
    tensors = [call.pop(key) for key in ("q", "k", "v", "g", "beta")]
    tensors += [None, torch.tensor([0, 2, 5]) if packed else None]
    options = {"output_final_state": wants_state}
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.cgdr_numba, name).default, tensors, options, test_utils=checks)


class Layer(torch.nn.Module):
    """A projection, the operator and a projection back, as a model has them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.run = getattr(ops, name)
        torch.manual_seed(0)
        self.project = torch.nn.Linear(4, 2 * HK * DK + HV * DV + 2 * HV)
        self.back = torch.nn.Linear(HV * DV, 4)

    def forward(self, x: Any, state: Any) -> Any:
        """Return y [B, T, 4] and the state after x [B, T, 4]."""
        q, k, v, g, beta = self.project(x).split((HK * DK, HK * DK, HV * DV, HV, HV), -1)
        q, k, v = q.unflatten(-1, (HK, DK)), k.unflatten(-1, (HK, DK)), v.unflatten(-1, (HV, DV))
        out, state = self.run(
            q,
            k,
            v,
            g=-torch.nn.functional.softplus(g),
            beta=beta.sigmoid(),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return self.back(out.flatten(2)), state


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_modules_have_no_graph_breaks(name: str, compiler: str) -> None:
    torch.compiler.reset()
    layer = Layer(name).eval()
    compiled = torch.compile(layer, fullgraph=True, backend=compiler, dynamic=False)
    x, state = torch.randn(B, T, 4), torch.randn(B, HV, DK, DV)
    with torch.no_grad():
        expected, expected_state = layer(x, state)
        found, found_state = compiled(x, state)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found_state, expected_state, rtol=1e-6, atol=1e-6)
    explained = torch._dynamo.explain(layer)(x, state)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_pass_says_why_there_is_none(name: str) -> None:
    call = call_of()
    call["q"].requires_grad_()
    out, _ = getattr(ops, name)(**call)
    with pytest.raises(UnsupportedError, match=f"{name}: no gradients are computed here"):
        out.sum().backward()


def test_export_keeps_one_node() -> None:
    layer = Layer("chunk_gated_delta_rule").eval()
    arguments = (torch.randn(B, T, 4), torch.randn(B, HV, DK, DV))
    with torch.no_grad():
        program = torch.export.export(layer, arguments)
        expected = layer(*arguments)
        found = program.module()(*arguments)
    calls = [node for node in program.graph.nodes if "cgdr_numba" in str(node.target)]
    assert len(calls) == 1
    assert torch.equal(found[0], expected[0])
