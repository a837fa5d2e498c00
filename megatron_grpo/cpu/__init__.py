"""What lets libraries that take CUDA for granted run on a CPU."""
