"""Measurements that back the figures in docs/benchmarks, one file each; `autopar bench` runs them."""
