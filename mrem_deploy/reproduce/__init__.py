"""The paper's experiments on a model of your own: `python -m mrem_deploy.reproduce WHAT …`."""
