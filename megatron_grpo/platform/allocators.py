"""Settings of memory allocators in a rank's environment, read when torch is first imported."""

# PYTORCH_ALLOC_CONF of ranks on GPUs: expandable segments, because microbatches of many sizes fragment segments of
# fixed size; and pinned blocks above 64 MB at their exact size, not rounded to a power of two.
CUDA_SETTINGS = "expandable_segments:True,pinned_max_cached_size_mb:64"
