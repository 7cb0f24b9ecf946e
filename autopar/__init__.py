"""autopar: an auto-parallelizing compiler for JAX."""

__version__ = "0.1.0"
