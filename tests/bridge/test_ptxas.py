"""What ptxas reports, read without compiling anything."""

from vitkernels.bridge import ptxas


def test_reports__counts_spills_once():
    """ptxas also warns of spills, with the same numbers."""
    text = (
        "ptxas warning : Registers are spilled, 70 bytes spill stores, 96 bytes spill loads\n"
        "    56 bytes stack frame, 70 bytes spill stores, 96 bytes spill loads\n"
    )
    assert ptxas._parsed(text)[:3] == (70, 96, False)
