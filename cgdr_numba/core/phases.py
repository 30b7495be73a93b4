"""The phases of the chunked kernel, in the order in which every backend runs them.

`level` says how often a phase runs: once a chunk (the K side) or once a V tile (the V side). Reads and writes are UB
slices by their names in the ledger, and `gm` for global memory.
"""

from typing import NamedTuple


class Phase(NamedTuple):
    """One phase: what it is called, how often it runs, which slices it touches."""

    name: str
    npu_name: str
    level: str
    formula: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


CHUNK_PHASES = (
    Phase("load_chunk_key", "Phase 1 LoadChunkKey", "chunk", "K = k", ("gm",), ("k", "v")),
    Phase("compute_g_cumsum", "Phase 1b ComputeGCumsum", "chunk", "G_i = G_(i-1) + g_i", ("gm",), ("g_cum",)),
    Phase("compute_k_beta", "Phase 2 ComputeKBeta", "chunk", "KB_i = beta_i K_i", ("gm", "k"), ("k_beta",)),
    Phase(
        "prepare_decay_and_exp",
        "Phase 3 PrepareDecayAndExp",
        "chunk",
        "E = e^G; D_ij = e^(G_i - G_j)",
        ("g_cum",),
        ("g_cum", "exp_g", "delta", "decay"),
    ),
    Phase(
        "prepare_attn_query_cache",
        "Phase 3.5 PrepareAttnQueryCache",
        "chunk",
        "QS = scale q",
        ("gm",),
        ("v", "attn_out"),
    ),
    Phase(
        "compute_scores",
        "Phase 4 ComputeAttnMatrix",
        "chunk",
        "B = -tril_-1(KB K^T . D)",
        ("k_beta", "k", "decay"),
        ("dot", "scores"),
    ),
    Phase(
        "compute_recursive_attn",
        "Phase 4 ComputeRecursiveAttn",
        "chunk",
        "A = (I - B)^-1",
        ("scores",),
        ("delta", "scores"),
    ),
    Phase(
        "compute_attn_cached",
        "Phase 4 ComputeAttnMatrix (Q cached)",
        "chunk",
        "M = tril(QS K^T . D), over D",
        ("attn_out", "k", "decay"),
        ("dot", "decay"),
    ),
    Phase(
        "compute_attn_reread",
        "Phase 4 ComputeAttnMatrix (Q read again)",
        "chunk",
        "M = tril(scale q K^T . D), over D",
        ("gm", "k", "decay"),
        ("delta", "dot", "decay"),
    ),
    Phase(
        "compute_k_cumdecay",
        "Phase 5 ComputeKCumdecay",
        "chunk",
        "KC = A diag(E) KB, over K",
        ("exp_g", "scores", "k_beta"),
        ("k_beta", "k"),
    ),
    Phase("load_v", "Step 1 LoadVBeta (load)", "V tile", "V = v", ("gm",), ("attn_out", "v")),
    Phase("scale_v_by_beta", "Step 1 LoadVBeta", "V tile", "VB_i = beta_i V_i", ("gm", "v"), ("v",)),
    Phase("compute_value_new", "Step 2 ComputeValueNew", "V tile", "U = A VB", ("scores", "v"), ("attn_out",)),
    Phase("load_state_tile", "Step 3 LoadStateTile (first chunk)", "V tile", "S = state^T", ("gm",), ("state",)),
    Phase("reload_state_tile", "Step 3 LoadStateTile (later chunk)", "V tile", "S", ("gm",), ("state",)),
    Phase(
        "compute_v_new",
        "Step 4 ComputeVNew",
        "V tile",
        "VN = U - KC S, over VB",
        ("k", "state", "attn_out"),
        ("v",),
    ),
    Phase(
        "compute_attn_inter",
        "Step 5 ComputeAttnInter",
        "V tile",
        "O_i = (scale q_i E_i)^T S",
        ("gm", "exp_g", "state"),
        ("attn_out", "delta"),
    ),
    Phase("accum_output", "Step 6 AccumOutput", "V tile", "O += M VN", ("decay", "v"), ("attn_out",)),
    Phase(
        "write_attn_tile",
        "Step 6 WriteAttnTileToGm",
        "V tile",
        "out = O",
        ("attn_out",),
        ("out_queue", "gm"),
    ),
    Phase(
        "update_state",
        "Step 7 UpdateAndWriteState",
        "V tile",
        "S = E_last S + (K . e^(G_last - G))^T VN",
        ("gm", "exp_g", "g_cum", "v", "state"),
        ("state", "delta"),
    ),
    Phase("store_state_tile", "Step 7 (a chunk follows)", "V tile", "S", ("state",), ("gm",)),
    Phase("write_final_state", "Step 7 (last chunk)", "V tile", "state = S^T", ("state",), ("out_queue", "gm")),
)
"""Phases 1 to 5 and the seven steps of phase 6, by the kernel's names."""
