"""What differs between CUDA and CPU, decided in one place."""
