"""Shard files: many images in each file, found by an index of (shard, offset, length).

Tar files in WebDataset's layout (one member per field, named KEY.FIELD) and Parquet files as on the Hugging Face hub (a
column of image bytes, a column of labels). The index is built once and then memory-mapped. Any image takes one read, so
images can be read in any order.
"""
