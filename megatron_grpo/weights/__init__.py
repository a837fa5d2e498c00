"""How the weights of each model family correspond between Hugging Face and Megatron-Core."""
