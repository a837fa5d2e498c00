"""The algorithms: their loops, and the tensor maths beneath them."""
