"""The `vitkernels` command and train.py's command line. Only its messages name settings and command lines."""
