"""What a step says when it fails, gives NaN, or does not answer.

an instruction of a pipeline fails        its stage, the instruction and a source line          -> failures.py
results hold NaN (`debug_nans`)           the operation that made it, stage and microbatch      -> nans.py
a first run does not end                  a warning that names the step                         -> watch.py
"""
