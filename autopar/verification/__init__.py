"""Checks that the compiled program does what the plan says: collectives, bytes and results.

    in     Plan, and the program as XLA or Shardy has compiled it
    out    a report: what matches, known deviations and their reasons, mismatches

Read `verify` first, then `lowering`.
"""
