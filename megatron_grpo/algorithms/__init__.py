"""The steps of every algorithm, as the driver runs them."""
