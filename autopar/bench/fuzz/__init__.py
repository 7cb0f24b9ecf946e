"""Random train steps, run in parallel and beside the plain step.

program     a train step as data, printed as Python source that runs by itself
generator   seed -> program
case        one program in microbatches, in stages and on meshes, against the plain step
noise       by how much the plain step differs from itself
shrink      a failing program with all taken out that the failure does not need
campaign    many seeds in worker processes; rows are kept in a file
"""
