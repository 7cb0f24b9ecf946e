"""Exact optimization of the discrete problem of the intra-op pass. Start with `autopar.passes.solver.optimize`."""
