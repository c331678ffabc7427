"""The `vitkernels` command and train.py's command line. Only this package words settings and command lines."""
