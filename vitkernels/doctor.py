"""`python -m vitkernels.doctor`: what this machine can run."""

from vitkernels.cli.doctor import main

if __name__ == "__main__":
    main()
