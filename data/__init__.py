"""The built-in data sets by short names, as `_target_: data.digits.build`; the code is in vitkernels.data.

vitkernels/data/__init__.py shows how to write one.
"""
