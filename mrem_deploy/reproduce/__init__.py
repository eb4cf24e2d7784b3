"""The paper's experiments on your model: `python -m mrem_deploy.reproduce WHAT …`."""
