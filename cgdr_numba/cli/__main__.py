"""``python -m cgdr_numba.cli`` is ``cgdr``."""

from cgdr_numba.cli import main

if __name__ == "__main__":
    main()
