"""The torch custom ops: correct fakes, one node for torch.compile and torch.export, equal bits, no backward pass."""

from typing import Any

import pytest

import cgdr_numba
from cgdr_numba import ContractError, DtypeError, UnsupportedError

torch = pytest.importorskip("torch")
ops = pytest.importorskip("cgdr_numba.integrations.torch")

NAMES = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"]
FORMS = [
    ("chunk_gated_delta_rule", "heads"),
    ("chunk_gated_delta_rule", "raw"),
    ("fused_recurrent_gated_delta_rule", "heads"),
    ("fused_recurrent_gated_delta_rule", "channels"),
    ("fused_recurrent_gated_delta_rule", "raw"),
    ("chunk_kda", "channels"),
    ("chunk_kda", "raw"),
    ("chunk_kda", "bounded"),
    ("fused_recurrent_kda", "channels"),
    ("fused_recurrent_kda", "raw"),
]
"""What the gates of a function may be: log decays by head or channel, or projections that become such."""
LAYOUTS = [(False, False), (True, False), (False, True), (True, True)]
"""Whether sequences are packed, and whether there is an initial state."""
B, T, HK, HV, DK, DV = 2, 5, 1, 2, 8, 6


def call_of(name: str, form: str, dtype: Any = None, *, packed: bool = False, with_state: bool = False) -> Any:
    """Return the tensors of a call and its options; q has tokens next to one another."""
    generator = torch.Generator().manual_seed(3)
    kind, batch = dtype or torch.float32, 1 if packed else B

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    tensors = {
        "q": random(batch, HK * DK, T).transpose(1, 2).view(batch, T, HK, DK).to(kind),
        "k": random(batch, T, HK, DK).to(kind),
        "v": random(batch, T, HV, DV).to(kind),
        "g": -random(batch, T, HV, *([DK] if "kda" in name else [])).abs(),
        "beta": random(batch, T, HV).sigmoid().to(kind),
    }
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    if form == "channels" and "kda" not in name:
        tensors |= {"gk": -random(batch, T, HV, DK).abs(), "gv": -random(batch, T, HV, DV).abs().to(kind)}
    if form in ("raw", "bounded"):
        n_biases = HV * DK if "kda" in name else HV
        tensors |= {"A_log": random(HV), "dt_bias": random(n_biases).to(kind)}
        options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    if form == "bounded":
        options |= {"safe_gate": True, "lower_bound": -4.0}
    if packed:
        tensors["cu_seqlens"] = torch.tensor([0, 2, 2, 5])
    if with_state:
        tensors["initial_state"] = random(3 if packed else batch, HV, DK, DV)
    return tensors, options


def same(found: Any, expected: Any) -> bool:
    """Return whether two pairs of out and a state are equal in dtypes, strides and bits."""
    return all(
        a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize(("packed", "with_state"), LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ops_give_the_functions_bits(name: str, form: str, packed: bool, with_state: bool, dtype: str) -> None:
    tensors, options = call_of(name, form, getattr(torch, dtype), packed=packed, with_state=with_state)
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    found = getattr(ops, name)(**tensors, **options)
    assert same(found, getattr(cgdr_numba, name)(**tensors, **options))
    assert all(torch.equal(tensors[key], before[key]) for key in tensors)


@pytest.mark.parametrize("name", NAMES)
def test_states_are_none_where_nobody_asks_and_v_first_where_wanted(name: str) -> None:
    tensors, options = call_of(name, "channels" if "kda" in name else "heads")
    out, state = getattr(ops, name)(**tensors, **options | {"output_final_state": False})
    assert state is None
    found, state = getattr(ops, name)(**tensors, **options, state_v_first=True)
    _, k_first = getattr(ops, name)(**tensors, **options)
    assert state.shape == (B, HV, DV, DK)
    assert torch.equal(found, out) or name == "chunk_gated_delta_rule"
    torch.testing.assert_close(state, k_first.transpose(2, 3), rtol=1e-5, atol=1e-6)
    assert same((found, state), getattr(cgdr_numba, name)(**tensors, **options, state_v_first=True))


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize(("packed", "with_state"), LAYOUTS)
def test_torchs_own_checks_of_the_op(name: str, form: str, packed: bool, with_state: bool) -> None:
    tensors, options = call_of(name, form, torch.bfloat16, packed=packed, with_state=with_state)
    op = getattr(torch.ops.cgdr_numba, name).default
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    arguments = [tensors.get(key) for key in names]
    assert {key for key, tensor in zip(names, arguments, strict=True) if tensor is not None} == set(tensors)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for wants_state in (False, True):
        torch.library.opcheck(op, arguments, options | {"output_final_state": wants_state}, test_utils=checks)


class Layer(torch.nn.Module):
    """An operator between others that round nothing, whatever a compiler makes of them."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.run, self.options = getattr(ops, name), options

    def forward(self, tensors: dict[str, Any]) -> Any:
        """Return results from q and v that are computed, and an out that is computed with."""
        made = {"q": 2 * tensors["q"], "v": -tensors["v"].flip(-1)}
        out, state = self.run(**{**tensors, **made}, **self.options)
        return 0.5 * out.flatten(2), state


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize(("packed", "with_state"), [(False, True), (True, False)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_modules_have_no_graph_breaks(name: str, form: str, packed: bool, with_state: bool) -> None:
    torch.compiler.reset()
    tensors, options = call_of(name, form, packed=packed, with_state=with_state)
    layer = Layer(name, options).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        assert same(compiled(tensors), layer(tensors))
    explained = torch._dynamo.explain(layer)(tensors)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form", "dtype"), [(*FORMS[i], d) for i, d in ((0, "float16"), (4, "bfloat16"))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_inductor_keeps_bits(name: str, form: str, dtype: str) -> None:
    torch.compiler.reset()
    tensors, options = call_of(name, form, getattr(torch, dtype), with_state=True)
    layer = Layer(name, options).eval()
    with torch.no_grad():
        assert same(torch.compile(layer, fullgraph=True)(tensors), layer(tensors))


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_gated_delta_rule"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_one_compiled_graph_serves_other_lengths(name: str) -> None:
    torch.compiler.reset()
    tensors, options = call_of(name, "channels")
    layer, n_graphs = Layer(name, options).eval(), []

    def counted(graph: Any, _: Any) -> Any:
        n_graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=counted, dynamic=True)
    for n_tokens in (T - 1, T - 2, T - 3):
        shorter = {key: tensor[:, :n_tokens] for key, tensor in tensors.items()}
        with torch.no_grad():
            assert same(compiled(shorter), layer(shorter))
    assert len(n_graphs) == 1


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_export_keeps_one_node(name: str, form: str, dtype: str) -> None:
    tensors, options = call_of(name, form, getattr(torch, dtype), packed=True, with_state=True)
    layer = Layer(name, options).eval()
    with torch.no_grad():
        program = torch.export.export(layer, (tensors,))
        assert same(program.module()(tensors), layer(tensors))
    calls = [node for node in program.graph.nodes if "cgdr_numba" in str(node.target)]
    assert len(calls) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_pass_says_why_there_is_none(name: str) -> None:
    tensors, options = call_of(name, "channels" if "kda" in name else "heads")
    tensors["q"].requires_grad_()
    out, _ = getattr(ops, name)(**tensors, **options)
    with pytest.raises(UnsupportedError, match=f"{name}: no gradients are computed here"):
        out.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_what_the_functions_refuse_the_ops_refuse(name: str) -> None:
    """With the functions' messages, when they run."""
    tensors, options = call_of(name, "channels" if "kda" in name else "heads")
    run = getattr(ops, name)
    with pytest.raises(ContractError, match=rf"^{name}: `k` must be \[B, T, Hk, Dk\] = \[2, 5, 1, 8\], got \[2, 5, 1"):
        run(**tensors | {"k": tensors["k"][..., 1:]}, **options)
    with pytest.raises(DtypeError, match=f"^{name}: `cu_seqlens` must hold integers, got float32"):
        run(**tensors, cu_seqlens=torch.tensor([0.0, 5.0]), **options)
    with pytest.raises(ContractError, match=f"^{name}: `A_log` must be left out without use_gate_in_kernel=True"):
        run(**tensors, A_log=torch.zeros(HV), **options)
    with pytest.raises(ContractError, match=f"^{name}: `allow_neg_eigval` must be False without"):
        run(**tensors, **options, allow_neg_eigval=True)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_tensors_on_meta_are_all_or_none(name: str, form: str) -> None:
    """Among real tensors one without memory would otherwise make results of whatever lies in theirs."""
    tensors, options = call_of(name, form, packed=True, with_state=True)
    run, on_meta = getattr(ops, name), {key: tensor.to("meta") for key, tensor in tensors.items()}
    out, state = run(**on_meta, **options)
    assert (out.device.type, out.shape, state.shape) == ("meta", tensors["v"].shape, tensors["initial_state"].shape)
    for key in tensors:
        wrong, came = ("k", "cpu") if key == "q" else (key, "meta")
        with pytest.raises(UnsupportedError, match=rf"^{name}: `{wrong}` must be where `q` is, .* on {came}"):
            run(**tensors | {key: on_meta[key]}, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("without", ["tokens", "rows", "sequences"])
def test_fakes_of_results_without_elements(name: str, without: str) -> None:
    tensors, options = call_of(name, "channels" if "kda" in name else "heads", packed=without == "sequences")
    tensors = {key: x[:0] if without == "rows" else x[:, :0] if x.ndim > 1 else x[:1] for key, x in tensors.items()}
    found = getattr(ops, name)(**tensors, **options)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = getattr(ops, name)(**{key: mode.from_tensor(x) for key, x in tensors.items()}, **options)
    described = [[(x.shape, x.stride(), x.dtype) for x in pair] for pair in (found, fakes)]
    assert described[0] == described[1]
    assert 0 in found[0].shape
