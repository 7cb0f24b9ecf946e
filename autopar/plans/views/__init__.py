"""A plan for people.

in     a plan, and for more detail the graph that it is for
out    tables, forms of parallelism in words, reasons for layouts, pictures
first  `summary.py`
"""
