"""`python -m vitkernels.tune`: the command `vitkernels tune`."""

from vitkernels.cli.tune import main

if __name__ == "__main__":
    main()
