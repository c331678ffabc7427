"""Chunks: 64 rows of queries or keys that a warpgroup keeps, in calls with ids.

A record describes each chunk. Ids, log-sum-exp and delta are stored in the order of the chunks, at
multiples of 64 as their copies require, wherever the rows of a chunk start.
"""

import torch

# Fields of a record. A chunk needs the other side's chunks from FIRST to END, and must compare ids from COMPARED on.
# Its first row is ROW. COUNT rows from there on are its own; the others belong to another chunk.
FIRST, END, COMPARED, ROW, COUNT = range(5)
# A list of work items of up to LISTED chunks lies beside the chunks of packed segments: the record with an item's
# number also has the item's first chunk, its number of chunks, and which chunks these need, as above.
ITEM, ITEM_CHUNKS, ITEM_FIRST, ITEM_END, ITEM_COMPARED = range(8, 13)
LISTED = 3
FIELDS = 16

_LEAST = torch.iinfo(torch.int32).min
MASKED, PADDING = _LEAST, _LEAST + 1  # ids of masked keys, and of rows beyond the last
