"""Layers that models share.

nn                products, norms, attention written out, losses; read it first
attention         attention by name: written out, JAX's, cuDNN's, or a Pallas kernel
grouped           products over groups of rows, by a Pallas kernel
selective_scan    the scan of a state-space model by name: JAX's associative scan, or a Pallas kernel
"""
