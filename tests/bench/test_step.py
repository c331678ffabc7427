"""The tables of a training step's benchmark."""

from vitkernels.bench.step import StepTimes, losses_table


def test_losses_are_set_against_the_baseline_wherever_it_stands():
    rows = [
        StepTimes(name, 1.0, 1.0, 1.0, 2, None, 0.0, losses[-1], losses)
        for name, losses in (("ours", [2.2, 1.1]), ("timm", [2.0, 1.0]))
    ]
    for order in (rows, rows[::-1]):
        table = losses_table(order, "timm", window=1)
        assert "| timm | 2.0000 | 1.0000 | 1.5000 |" in table
        assert "| ours | +10.00 % | +10.00 % | +10.00 % |" in table
