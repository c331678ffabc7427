"""The generated pages of docs/reference, one module per subject; scripts/docs_reference.py writes them."""
