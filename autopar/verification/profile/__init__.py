"""A measured step beside the predicted one.

    in     a compiled step and its arguments
    out    Profile: every operation that ran, times beside the predicted ones, one timeline of both

Read `comparison` first, then `measure`.
"""
