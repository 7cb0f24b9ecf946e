"""Does the compiled program do what the plan says: collectives, bytes and results, compared with the compiler's output.

    in     Plan, and the program as XLA or Shardy has compiled it
    out    a report: what agrees, what is known to differ and why, what is wrong

Read `verify` first, then `lowering`.
"""
