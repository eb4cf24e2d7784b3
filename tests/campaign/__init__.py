"""A campaign of faults against the commands: `python -m tests.campaign --help`, or `make faults`."""
