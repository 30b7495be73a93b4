"""Without torch in the process nothing asks for it."""

import subprocess
import sys


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, cgdr_numba, cgdr_numba.cli, cgdr_numba.core.tensors as t; "
        "assert not t.is_tensor(1.0); assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
