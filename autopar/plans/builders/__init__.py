"""Solutions of the planner become plans: begin with `common`.

common      what every plan says of its program and stages
one_mesh    a program on one mesh
pipeline    a step in stages; also the stages of a saved plan
notes       what both note of their programs
"""
