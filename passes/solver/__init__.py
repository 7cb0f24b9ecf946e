"""Exact methods for the discrete problem of the intra-op pass: see `autopar.passes.solver.optimize`."""
