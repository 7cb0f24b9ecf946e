"""Checkpoints: the arrays of a pytree on disk, independent of plans, meshes and numbers of processes.

    save        copy the parts of this process to the host, write them in a thread             -> save.py
    restore     read the parts that this process needs, in the wanted shardings                -> restore.py
    layers      a tree whose layers are stacked, read from one in which they are not             -> layers.py
    folder      which checkpoints in a folder are whole                                        -> folder.py
    arrays      one array on disk: chunks of a zarr array, read and written by TensorStore     -> arrays.py

A checkpoint holds the whole arrays in global coordinates. A process writes the boxes that it has the first replica of,
and reads the boxes that its devices want, so that neither side needs to know the layout of the other.
"""

from autopar.checkpoints.restore import is_saved, restore, saved_names
from autopar.checkpoints.save import Saving, names, save

__all__ = ["Saving", "is_saved", "names", "restore", "save", "saved_names"]
