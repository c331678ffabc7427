"""Freeze the garbage collector's objects; the fork server imports this last, so ranks do not traverse them again."""

import gc

gc.collect()
gc.freeze()
