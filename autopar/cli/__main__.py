"""`python -m autopar.cli`."""

from autopar.cli import main

main()
