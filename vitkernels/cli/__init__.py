"""The `vitkernels` command and train.py's command line; adds the setting's name to errors from the layers below."""
