"""Order the work of a Pallas TPU kernel, whose compiler keeps products where the source issues them."""


def pipelined(items, first, second) -> None:
    """Software-pipeline: issue first(item) of the next item before second(item, ...) of the current one.

    The compiler does not move a product across the elementwise work that precedes it. In this order the MXU and the
    vector units work concurrently.
    """
    waiting: tuple = ()
    for item in items:
        issued = first(item)
        if waiting:
            second(*waiting)
        waiting = (item, issued)
    if waiting:
        second(*waiting)
