"""Layers into stages on submeshes, with microbatches, a schedule and recomputation, by search.

    in     Graph, Cluster, what is open
    out    StageChoice: borders, submeshes, microbatches, schedule; the stages assembled from it

Read `search` first, then `dynamic_program`.
"""
