"""Builds the wheels that are published (`make wheels`), and tests them with every TensorFlow (`make matrix`)."""
