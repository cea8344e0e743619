"""Key-value tables of TensorFlow recommender models: inspect, clip, export and serve them."""
