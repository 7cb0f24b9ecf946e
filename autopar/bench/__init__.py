"""Measurements that back the figures in docs/benchmarks.md, one file each; `autopar bench` runs them."""
