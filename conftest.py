"""What pytest leaves out where an extra is not installed: modules whose examples need it."""

from importlib.util import find_spec

NEEDS = {
    "torch": ["cgdr_numba/integrations/torch.py", "cgdr_numba/integrations/custom_ops.py"],
    "transformers": [
        "cgdr_numba/integrations/generation.py",
        "cgdr_numba/integrations/recording.py",
        *[
            f"cgdr_numba/integrations/transformers/{name}.py"
            for name in ("__init__", "architectures", "guard", "operators", "routes")
        ],
    ],
}
"""By library: modules that import it."""

collect_ignore = [path for library, paths in NEEDS.items() if find_spec(library) is None for path in paths]
