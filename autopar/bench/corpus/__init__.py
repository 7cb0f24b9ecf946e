"""`autopar bench corpus`: train steps as other people write them, checked one by one.

    in     programs of a module such as `tests.corpus`, chosen by name
    out    one finding per program and check, kept in a file; a table of them

Read `run` first, then `case`.

program     a program of the corpus: how it is built, at which scale, with which packages
case        the checks of one program, in a worker process
compare     results leaf by leaf against the single device
run         all programs, each in workers of its own
"""
