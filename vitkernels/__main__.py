"""`python -m vitkernels`: the `vitkernels` command."""

import sys

from vitkernels.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
