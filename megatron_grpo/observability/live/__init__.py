"""A run followed while it goes on: its files read as they grow, served as a page or shown in a terminal."""
