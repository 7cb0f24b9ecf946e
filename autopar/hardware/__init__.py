"""Devices and links: presets, cluster files, the local devices, and meshes over them.

    in     a preset's name, a TOML file, or the devices that JAX reports
    out    Cluster, and its LogicalMesh with the links of every axis; Calibration, its figures fitted to measurements

Read `cluster` first, then `links`.
"""
