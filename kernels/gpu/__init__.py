"""The low-rank product on a GPU: Triton kernels over one list of items, and what drives them."""
