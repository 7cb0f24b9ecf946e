"""Answers to questions about a plan that its data alone does not answer.

    in     the planned step, its options, a way to plan it again
    out    what other layouts cost; the plan under other options

`origin` is what `autopar.plans.plan.Plan.origin` refers to, `problems` the problems of the step and of its stages,
`baselines` plans that people know, `hints` what would be faster, `surroundings` memory, hosts and the text of the
user's lines that a plan names;
`autopar.passes.intra_op.alternatives` has the mathematics. Read `origin` first.
"""
