"""Data flows one way: no module imports one that stands earlier in the pipeline."""

import ast
from pathlib import Path

import pytest

import cgdr_numba

ROOT = Path(cgdr_numba.__file__).parent
LAYERS = [
    ("cli", "integrations"),
    ("parity",),
    ("__init__",),
    ("ops",),
    ("pool_backends",),
    ("backends",),
    ("parts",),
    ("core.pool_contract",),
    ("core.contract",),
    ("core.gate_options",),
    ("sched",),
    ("core.slots",),
    ("core.checks",),
    ("core.fast.pool_launch",),
    ("core.fast.channel_launch",),
    ("core.golden", "core.golden_pool", "core.faithful.launch", "core.faithful.pool_launch", "core.fast.launch"),
    ("core.faithful.worker", "core.faithful.pool_worker", "core.fast.step_worker", "core.fast.chunk_worker"),
    ("core.fast.channel_worker", "core.fast.pool_worker"),
    ("core.faithful.phases_v", "core.faithful.pool_phases", "core.fast.phases_v"),
    ("core.faithful.phases_k", "core.fast.phases_k"),
    ("core.fast.chunk_arena", "core.fast.channel_step", "core.fast.pool_step"),
    ("core.fast.step", "core.fast.decay"),
    ("core.fast.k_first", "core.fast.v_first", "core.fast.channel_passes", "core.fast.blocks", "core.fast.stream"),
    ("core.fast.convert", "core.fast.solve", "core.fast.microkernel", "core.fast.pairs"),
    ("core.faithful", "core.fast", "core.phases", "core.gates"),
    ("core.tensors",),
    ("core.entry",),
    ("core.dtypes", "core.exp64", "core.l2norm", "core.memory", "core.ragged", "core.schedule"),
    ("core.jit", "core.served"),
    ("core.cache", "core.threads", "core.lease"),
    ("core.cores",),
    ("core.dims", "errors", "core"),
]
"""From the public calls to the leaves; a package stands for all of its modules that are not named themselves."""


def layer_of(module: str) -> int:
    """The layer of the longest entry that the module's name begins with."""
    matches = [
        (len(name), depth)
        for depth, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    assert matches, f"{module} stands in no layer"
    return max(matches)[1]


def imports_at_run_time(path: Path) -> list[str]:
    """Modules of the package that a file imports, those for type checkers left out."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and id(node) not in guarded
            and (node.module or "").startswith("cgdr_numba")
        ):
            base = (node.module or "").removeprefix("cgdr_numba").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                is_module = (ROOT / (inner.replace(".", "/") + ".py")).exists() or (
                    ROOT / inner.replace(".", "/")
                ).is_dir()
                found.append(inner if is_module else base or "__init__")
    return found


FILES = sorted(path for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_to_the_right(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for imported in imports_at_run_time(path):
        assert layer_of(imported) >= layer_of(module), f"{module} imports {imported}"


def test_the_check_finds_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from cgdr_numba.ops import BACKENDS\nfrom cgdr_numba.core import contract\n")
    assert imports_at_run_time(wrong) == ["ops", "core.contract"]
    assert layer_of("ops") < layer_of("core.contract") < layer_of("core.faithful.phases_k") < layer_of("core.dims")
