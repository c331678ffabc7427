"""Chunks: 64 rows of queries or keys that a warpgroup keeps, in calls with ids.

A record describes each chunk. Ids, log-sum-exp and delta are stored in the order of the chunks, at multiples of 64 as
their copies require, wherever the rows of a chunk start.
"""

import torch

# Fields of a record. A chunk needs the other side's chunks from FIRST to END, and must compare ids from COMPARED on.
# Its first row is ROW. COUNT rows from there on are its own. The others belong to another chunk, or lie beyond the last
# row, and must not be stored. (Without packed segments, COUNT includes those beyond the last row, which the TMA unit
# drops.) Of packed segments, SEGMENT_TOKENS is the length of its segment.
FIRST, END, COMPARED, ROW, COUNT, SEGMENT_TOKENS = range(6)
# The records of all batch entries together list the work items of packed segments, of up to LISTED chunks: the record
# with an item's number also has the item's first chunk, its number of chunks, which chunks these need, as above,
# SEGMENT_TOKENS, the first row of its segment, and the batch entry. Entries are listed in any order; the other records
# have no item.
ITEM, ITEM_CHUNKS, ITEM_FIRST, ITEM_END, ITEM_COMPARED, ITEM_TOKENS, ITEM_ROW, ITEM_ENTRY = range(8, 16)
LISTED = 3
# A quad is QUAD chunks with whole segments. The kernels for short sequences process it as if it were a sequence; for
# the other kernels, its chunks are empty. The records of all batch entries together list the quads: from QUAD_ENTRY on,
# each of a quad's chunks has its first row, its number of own rows, and the first and end of the chunks that it needs,
# as indices among the chunks of all batch entries. So the first chunk's QUAD_FIRST is its own index.
QUAD, QUAD_ENTRY = 4, 16
QUAD_ROW, QUAD_COUNT, QUAD_FIRST, QUAD_END = range(4)
QUAD_FIELDS = 4
FIELDS = QUAD_ENTRY + QUAD * QUAD_FIELDS  # 128 bytes, which one copy needs at least
# What is counted. Long segments are those for which the fused backward kernel is faster; see LONG in schedule.py and
# packed_chunks. In the batch entry with the most: used chunks of queries, and of keys. Of all batch entries: work
# items; quads; how many more pairs of chunks that need each other there are in long segments than in others that are
# not in quads; the batch entries whose chunks lie at multiples of 64; and the chunks of long segments.
USED_QUERIES, USED_KEYS, ITEMS, QUADS, LONG_SURPLUS, UNMOVED_ENTRIES, LONG_CHUNKS = range(7)
COUNTS = 7

_LEAST = torch.iinfo(torch.int32).min
MASKED, PADDING = _LEAST, _LEAST + 1  # ids of masked keys, and of rows beyond the last


def prefers_fused(counts):
    """Return whether the fused backward kernel processes the segments that are not in quads, rather than the pair.

    counts: as counted above, in device memory.
    """
    return (counts[LONG_SURPLUS] > 0) & (counts[UNMOVED_ENTRIES] == 0)
