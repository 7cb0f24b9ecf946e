"""Pipelines measured: against the simulator (`simulated`), against GPipe by hand (`gpipe`); schedules by themselves."""
