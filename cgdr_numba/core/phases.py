"""The phases of the kernels, in the order in which faithful runs them, and what fast makes of the chunked one's.

`level` says how often a phase runs: once a chunk (the K side) or once a V tile (the V side); in the recurrent kernel
once a sequence, a head, a V tile, or a token of a V tile. Reads and writes are UB
slices by their names in the ledger, and `gm` for global memory.
"""

from typing import Final, NamedTuple


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


STEP_PHASES: Final = (
    Phase("load_head_values", "", "sequence", "beta = beta", ("gm",), ("beta",)),
    Phase("load_decays", "", "sequence", "e^g; e^gk where gk is scalar", ("gm",), ("g", "gk")),
    Phase("load_rows", "CopyInQKV", "head", "Q = q; K = k; V = v", ("gm",), ("q", "k", "v")),
    Phase("scale_query", "CopyInQKV", "head", "Q = scale Q", ("q",), ("q",)),
    Phase("load_column_decays", "CopyInQKV", "head", "e^gk where gk is a vector", ("gm",), ("gk",)),
    Phase("prefetch_state", "PrefetchState", "V tile", "the next tile's rows", ("gm",), ("state_queue",)),
    Phase("take_state", "LoadPrefetchedState", "V tile", "S = pool[read slot]", ("state_queue",), ("state",)),
    Phase("decay_state", "Compute", "token", "S = e^g S; S = e^gk S", ("g", "gk", "state"), ("state",)),
    Phase("decay_columns", "Compute", "token", "S = S diag(e^gk)", ("gk", "state"), ("state",)),
    Phase(
        "learn_rows",
        "Compute",
        "token",
        "S = S + beta (v - S k) k^T, row by row",
        ("k", "v", "beta", "state"),
        ("product", "state"),
    ),
    Phase("read_rows_out", "Compute", "token", "o = S Q", ("q", "state"), ("product", "attn")),
    Phase("queue_attn", "QueueAttnOutput", "token", "half(o)", ("attn",), ("attn_out",)),
    Phase("queue_state", "QueueStateOutput", "token", "half(S)", ("state",), ("state_out",)),
    Phase("copy_attn", "CopyOutAttn", "token", "out = half(o)", ("attn_out",), ("gm",)),
    Phase("copy_state", "CopyOutState", "token", "pool[write slot] = half(S)", ("state_out",), ("gm",)),
)
"""The pieces of the recurrent kernel over a pool in their order, by functions in `core.faithful.pool_phases`; the two
copies of a token come after the next token's `queue_state` where their queue has depth 2."""


class FastPhase(NamedTuple):
    """One step of the fast backend: which function it is, how often it runs, which phases of the kernel it ends."""

    name: str
    module: str
    level: str
    formula: str
    covers: tuple[str, ...]
    """Phases of the kernel whose result is complete with this step."""
    begins: tuple[str, ...] = ()
    """Phases whose products are formed here, and which a later step ends."""


FAST_PHASES: Final = (
    FastPhase("load_state", "phases_v", "item", "S = state^T", ("load_state_tile",)),
    FastPhase(
        "load_pair", "phases_k", "key head", "K = k; Q = scale q", ("load_chunk_key", "prepare_attn_query_cache")
    ),
    FastPhase(
        "compute_raw_scores",
        "phases_k",
        "key head",
        "K K^T; Q K^T",
        (),
        ("compute_scores", "compute_attn_cached", "compute_attn_reread"),
    ),
    FastPhase(
        "load_gates",
        "decay",
        "value head",
        "G in float64; E = e^G; e^-G; e^(G_last - G)",
        ("compute_g_cumsum",),
        ("prepare_decay_and_exp",),
    ),
    FastPhase(
        "decay_scores",
        "decay",
        "value head",
        "D_ij = e^(G_i - G_j); B = -beta K K^T . D; M = Q K^T . D",
        ("prepare_decay_and_exp", "compute_scores", "compute_attn_cached", "compute_attn_reread"),
    ),
    FastPhase("load_block", "blocks", "value head", "V = v", ("load_v",)),
    FastPhase("multiply_ahead", "microkernel", "value head", "K S; Q S", (), ("compute_v_new", "compute_attn_inter")),
    FastPhase(
        "solve",
        "solve",
        "value head",
        "U = beta V - beta E K S + B U; O = E Q S + M U",
        (
            "compute_recursive_attn",
            "scale_v_by_beta",
            "compute_value_new",
            "compute_v_new",
            "compute_attn_inter",
            "accum_output",
        ),
    ),
    FastPhase("narrow_rows", "convert", "value head", "out = O", ("write_attn_tile",)),
    FastPhase(
        "multiply_onto_scaled_ahead",
        "microkernel",
        "value head",
        "S = E_last S + K^T (e^(G_last - G) U)",
        ("update_state",),
    ),
    FastPhase("store_state", "phases_v", "item", "state = S^T", ("write_final_state",)),
)
"""The steps of fast in their order, by functions in `core.fast`. U is the kernel's VN; the steps from `load_block` to
`multiply_onto_scaled_ahead` are one function, `run_head`. A key head's steps run once for all of its value heads."""

FAST_NEVER_FORMS: Final = {
    "compute_k_beta": "beta is a factor on the rows of B and of K S",
    "compute_k_cumdecay": "forward substitution takes beta E K S instead, and no inverse",
    "reload_state_tile": "S stays in scratch from chunk to chunk",
    "store_state_tile": "S stays in scratch from chunk to chunk",
}
"""Phases of the kernel that fast has no counterpart of, and why."""
