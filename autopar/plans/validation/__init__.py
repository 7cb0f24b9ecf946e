"""Whether a plan that comes from a file can be trusted. Enters: JSON, a program; leaves: a plan, or an error that names
the field and what was expected there.

schema        frozen dataclasses as JSON: types and ranges; read this first
consistency   what one field says of another
layouts       whether the layouts fit the program
"""
