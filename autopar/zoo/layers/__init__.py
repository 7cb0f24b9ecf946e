"""Layers that models share.

nn           products, norms, attention written out, losses; read it first
attention    attention by name: written out, JAX's, cuDNN's, or a Pallas kernel
"""
