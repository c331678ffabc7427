"""The `vitkernels` command and train.py's command line; names the setting in errors of the layers below."""
