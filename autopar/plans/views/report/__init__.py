"""The report of a plan: one HTML file that needs no network.

    in     a plan; what another plan of the same step takes, for the comparison
    out    a page: words and figures, devices, timeline, source lines, memory, tensors, layouts, collectives, solver

`page` puts the sections into the template; `charts` has what plotly draws, `pictures` what is drawn as SVG, and
`tables` the rows of tables. Read `page` first.
"""
