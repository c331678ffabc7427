"""`python -m vitkernels.doctor`: the command `vitkernels doctor`."""

from vitkernels.cli.doctor import main

if __name__ == "__main__":
    main()
