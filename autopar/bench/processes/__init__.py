"""Several processes: equality, deaths, transfers, a soak, and the time of a step; one command each."""
