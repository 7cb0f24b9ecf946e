"""Models in the libraries that users write them in: Flax Linen, Flax NNX, Equinox.

    in     a configuration
    out    a `Model` whose step needs no change to be parallelized

Read `build` first: it imports a library only when one of its models is built.
"""
