"""`python -m vitkernels.tune`: measure each op's backends on this GPU."""

from vitkernels.cli.tune import main

if __name__ == "__main__":
    main()
