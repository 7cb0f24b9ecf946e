"""Draws random train steps.

    in     a seed
    out    Program: a train step as data

scope       a program under construction: values, and what is known of them
elementwise, shapes, indexing, totals, regions, experts     moves: what may come next
generate    seed -> program
"""
