"""DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556): an indexer chooses the keys each query attends to."""
