"""What `python -m mrem_deploy.benchmark WHAT` measures: one file per verb, and what they share."""
